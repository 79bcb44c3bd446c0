"""The router: which experts each token goes to, and with which weights.

The only place that knows routing rules. The rules are those of the checkpoints' own configs, and
equal transformers' routers for ``deepseek_v3``, ``glm4_moe_lite`` and ``deepseek_v2``, with two
choices to know of. (1) ``norm_topk_prob`` is honoured for softmax scores too, where transformers'
``deepseek_v2`` ignores it; published V2 checkpoints have it false, so both agree on them. (2) An
expert of a group that was not picked is never chosen: transformers' ``deepseek_v2`` gives such
experts the score 0 and may choose one when all others have underflowed to 0 as well, with weight 0
either way.

Shape letters: T tokens, K choices per token, E logical experts, G groups, H hidden.
"""

import torch

from moe_ep.linear import Linear

NORM_EPS = 1e-20  # keeps 0 / 0 away when every chosen score underflowed


class Gate:
    """Scores, picks and weighs experts; computes in float32 whatever the input's dtype.

    weight: ``[E, H]``. bias: float32 ``[E]`` or None; it picks but never weighs
    (``e_score_correction_bias``).
    scoring_func: "sigmoid" or "softmax", over the experts.
    topk_method: "greedy" takes the K best experts. "group_limited_greedy" first keeps the
        ``topk_group`` groups whose best expert scores highest; "noaux_tc" those whose two best
        experts score highest together.
    norm_topk_prob: weights are divided by their sum; then all are times routed_scaling_factor.
    Raises ValueError for sizes that do not fit each other and for unknown names.
    """

    def __init__(
        self,
        *,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_topk: int,
        n_group: int,
        topk_group: int,
        scoring_func: str,
        topk_method: str,
        norm_topk_prob: bool,
        routed_scaling_factor: float,
    ) -> None:
        _check_one_of("scoring_func", scoring_func, ("sigmoid", "softmax"))
        _check_one_of("topk_method", topk_method, ("greedy", "group_limited_greedy", "noaux_tc"))
        if topk_method == "greedy":
            n_group = topk_group = 1
        _check_sizes(weight.shape[0], num_topk, n_group, topk_group)
        self.num_experts = len(weight)
        self._project = Linear(weight, torch.float32)
        self.bias = None if bias is None else bias.float()
        self.num_topk = num_topk
        self.n_group = n_group
        self.topk_group = topk_group
        self.scoring_func = scoring_func
        self.norm_topk_prob = norm_topk_prob
        self.routed_scaling_factor = routed_scaling_factor
        group_size = weight.shape[0] // n_group
        self.num_best_of_group = min(2, group_size) if topk_method == "noaux_tc" else 1

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route ``x [T, H]`` to topk_idx int64 ``[T, K]`` with topk_weights float32 ``[T, K]``.

        The order of a token's choices is unspecified. A row's result depends on that row alone;
        a row with NaN gives valid indices and unspecified weights.
        """
        logits = self.logits(x)
        scores = logits.sigmoid() if self.scoring_func == "sigmoid" else logits.softmax(dim=-1)
        choice = scores if self.bias is None else scores + self.bias
        if self.topk_group < self.n_group:
            choice = self._keep_best_groups(choice)
        topk_idx = choice.topk(self.num_topk, dim=-1, sorted=False).indices
        weights = scores.gather(1, topk_idx)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + NORM_EPS)
        return topk_idx, weights * self.routed_scaling_factor

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 ``[T, E]``, from which all else follows."""
        return self._project(x.float())

    def _keep_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        grouped = choice.unflatten(1, (self.n_group, -1))  # [T, G, E / G]
        group_scores, best = grouped.max(dim=-1)
        if self.num_best_of_group == 2:
            # The maximum of the others: topk for two takes three times as long on a CPU.
            others = grouped.scatter(-1, best.unsqueeze(-1), float("-inf"))
            group_scores = group_scores + others.amax(dim=-1)
        kept = group_scores.topk(self.topk_group, dim=-1, sorted=False).indices
        is_dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
        return grouped.masked_fill(is_dropped.unsqueeze(-1), float("-inf")).flatten(1)


def _check_one_of(field: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ValueError(f"{field}: {given!r} given, one of {', '.join(allowed)} allowed")


def _check_sizes(num_experts: int, num_topk: int, n_group: int, topk_group: int) -> None:
    if n_group < 1 or num_experts % n_group:
        raise ValueError(f"n_group: {n_group} given, must divide the {num_experts} experts")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group: {topk_group} given, 1 to {n_group} (n_group) allowed")
    num_eligible = topk_group * (num_experts // n_group)
    if not 1 <= num_topk <= num_eligible:
        raise ValueError(
            f"num_topk: {num_topk} given, 1 to {num_eligible} allowed "
            f"({topk_group} of {n_group} groups of {num_experts} experts)"
        )
