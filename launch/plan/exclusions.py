"""Published records that this model cannot be held against, and why. Decided by what a record says
of itself, never by how well it would be predicted."""

from launch.plan.published import Record

_SOURCES_OF_OTHERS = {
    "ROCm/mori": "other hardware",
    "arXiv": "other hardware, or another model",
    "uccl": "another exchange library",
    "TensorRT-LLM": "another exchange library, or NVFP4",
    "trtllm": "another exchange library, or NVFP4",
    "pegainfer": "GLM-5.2, K2.5 INT4 or K3: attention or weights this engine does not have",
    "llm-d blog 2026": "GLM-5.2: sparse attention",
    "llm-d blog v0.5": "neither batch nor context is published",
    "LongCat": "another model",
    "InferenceX": "tensor parallelism, or NVFP4",
    "tenstorrent": "tensor parallelism",
    "moe_ep_benchmark": "a fused kernel for dispatch, experts and combine",
    "49636": "a fused kernel for dispatch, experts and combine",
    "DeepGEMM PR": "a fused kernel for dispatch, experts and combine, or another model",
    "pics/decode.png": "read off a picture without a batch, on an axis without labels",
    '"before" picture': "read off a picture that states neither batch nor EP size",
    "ebfe47e": "superseded: the same kernels before they used NVLink",
    "day_6": "fleet average: no batch is published",
    "restating Day-6": "fleet average: no batch is published",
}


def reason_against(record: Record) -> str | None:
    """Why the record cannot be compared, as far as its source and its note tell."""
    for part, reason in _SOURCES_OF_OTHERS.items():
        if part in record.source:
            return reason
    checks = (
        ("NVFP4" in record.dtype or "nvfp4" in record.dtype, "NVFP4 weights"),
        ("power_law" in record.note, "skewed routing; the slowest rank's load is not published"),
        (record.unit == "GB/s" or "gbps" in record.metric, "a bandwidth without its byte count"),
        ("untuned fabric" in record.note, "marked as an untuned fabric"),
        (", 12 SMs" in record.note or (", 20 SMs" in record.note and record.ep != 8),
         "fewer SMs than DeepEP's tuned configs"),
        ("pplx on" in record.note or "EFA" in record.gpu, "another exchange library or fabric"),
        ("on CX7" in record.note and record.ep == 8, "NVLink only, on a card that is not stated"),
        ("quoting deepseek-ai/profile-data" in record.source and record.phase == "decode",
         "tokens accepted per step are not published; the step itself is another record"),
        (record.metric == "decode_step_ms" and record.quality == "derived",
         "derived from another record of the same source"),
        ("transfer, overlapped" in record.note or "inside the profile" in record.note,
         "measured inside an overlapped step, with the waiting"),
        (record.source.endswith("reporter.md") and record.metric.startswith("decode_tok"),
         "tokens accepted per step are not published; the step itself is another record"),
        ("MTP 2 draft steps" in record.note, "tokens accepted per step are not published"),
        ("gb200-part" in record.source and record.phase == "decode", "no batch is published"),
        ("2026-0" in record.source, "NVFP4 weights, or no batch is published"),
        (record.metric == "layers_ms", "part of another record of the same trace"),
    )  # fmt: skip
    return next((reason for is_so, reason in checks if is_so), None)
