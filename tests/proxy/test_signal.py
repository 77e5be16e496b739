"""The artefact: content hashes, the checksum, and what is refused."""

import contextlib
import dataclasses
import json
import os
import shutil
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.envs.vocabulary import read_vocabulary
from rlx.proxy import contents
from rlx.proxy.contents import read_contents
from rlx.proxy.signal import (
    FILE,
    Signal,
    SignalError,
    check_models,
    find_signals,
    read_part,
    read_signal,
    write_signal,
)
from rlx.proxy.vocabulary import VocabularyError, shared_ids, vocabulary_hash
from tests import tiny_tokenizer


def write_model(directory, seed=0, **config):
    directory.mkdir()
    rng = np.random.default_rng(seed)
    tensors = {f"layer.{i}": rng.normal(size=(3, 4)).astype(np.float32) for i in range(3)}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"hidden_size": 4, **config}))
    return directory


def write_adapter(directory, base):
    directory.mkdir()
    save_file({"lora": np.ones((2, 2), np.float32)}, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"r": 2, "base_model_name_or_path": str(base)}))
    return directory


@pytest.fixture
def models(tmp_path):
    tiny_tokenizer.build(write_model(tmp_path / "base"))
    return tmp_path / "base", write_model(tmp_path / "expert", 1)


@pytest.fixture
def signal(models):
    base, expert = (read_part(str(path)) for path in models)
    vocabulary = read_vocabulary(base.path)
    tokens = vocabulary_hash(vocabulary), len(vocabulary)
    return Signal("s", base, expert, *tokens, 1.0, {"updates": 3}, {"seconds": 2.0}, "2026-01-01")


def test_a_hash_is_of_the_content_however_it_is_cut_or_named(models, tmp_path):
    base, _ = models
    one = read_contents(base)
    assert (one.parameters, one.size_bytes, one.adapter_of) == (36, 144, "")
    cut = tmp_path / "cut"
    cut.mkdir()
    tensors = load_file(base / "model.safetensors")
    save_file({"layer.2": tensors["layer.2"]}, cut / "model-00001-of-00002.safetensors", metadata={"format": "np"})
    save_file({n: tensors[n] for n in ("layer.1", "layer.0")}, cut / "model-00002-of-00002.safetensors")
    (cut / "config.json").write_text(json.dumps({"transformers_version": "9", "hidden_size": 4}))
    assert read_contents(cut).hash == one.hash
    tensors["layer.1"][1, 1] += 1e-6
    save_file(tensors, base / "model.safetensors")
    assert read_contents(base).hash != one.hash


def test_an_adapter_is_a_part_with_its_base(models, tmp_path):
    base, _ = models
    part = read_part(str(write_adapter(tmp_path / "adapter", base)))
    assert (part.path, part.adapter) == (str(base), str(tmp_path / "adapter"))
    assert part.parameters == 40
    assert part.model_hash == read_part(str(base)).hash != part.hash


@pytest.mark.parametrize("of_b, product", [(0.0, "no"), (1.0, "some"), (np.array([[0, 1]] * 3), "no")])
def test_an_adapter_whose_products_are_zero_adds_nothing(models, tmp_path, signal, of_b, product):
    base, _ = models
    adapter = write_adapter(tmp_path / "adapter", base)
    factors = {"q.lora_A.weight": np.array([[1, 2], [0, 0]]), "q.lora_B.weight": np.broadcast_to(of_b, (3, 2))}
    save_file({n: np.array(x, np.float32) for n, x in factors.items()}, adapter / "adapter_model.safetensors")
    assert contents.adds_nothing(adapter) == (product == "no")
    made = dataclasses.replace(signal, expert=read_part(str(adapter)))
    with pytest.raises(SignalError, match="nothing was learned") if product == "no" else contextlib.nullcontext():
        check_models(made)


def test_a_signal_reads_back_and_is_never_overwritten(signal, tmp_path):
    write_signal(tmp_path / "s", signal)
    assert read_signal(tmp_path / "s") == signal
    check_models(signal)
    with pytest.raises(FileExistsError, match="another directory"):
        write_signal(tmp_path / "s", signal)


def truncated(file):
    file.write_bytes(file.read_bytes()[:-40])


def edited(file):
    file.write_text(file.read_text().replace('"alpha": 1.0', '"alpha": 9.0'))


def removed(file):
    file.unlink()


@pytest.mark.parametrize(
    "damage, said", [(truncated, "not JSON"), (edited, "checksum"), (removed, "there is no signal")]
)
def test_a_truncated_edited_or_missing_file_is_refused(signal, tmp_path, damage, said):
    damage(write_signal(tmp_path / "s", signal))
    with pytest.raises(SignalError, match=said):
        read_signal(tmp_path / "s")


def test_a_model_that_has_changed_or_gone_is_refused(signal, models):
    base, expert = models
    shutil.rmtree(expert)
    with pytest.raises(SignalError, match="its expert cannot be read"):
        check_models(signal)
    write_model(expert, 2)
    with pytest.raises(SignalError, match=r"its expert in .* has changed since"):
        check_models(signal)
    truncated(base / "model.safetensors")
    with pytest.raises(SignalError, match=r"its base cannot be read.*cut short"):
        check_models(signal)


def test_a_tokenizer_that_has_changed_or_gone_is_refused(signal, models):
    base, _ = models
    file = base / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["7"] = vocabulary["7"], vocabulary["3"]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(SignalError, match=r"the tokenizer in .*base has changed since"):
        check_models(signal)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink(missing_ok=True)
    with pytest.raises(SignalError, match="its base has no tokenizer"):
        check_models(signal)


def test_paths_are_absolute_so_that_a_signal_is_found_from_elsewhere(models, monkeypatch):
    base, _ = models
    monkeypatch.chdir(base.parent)
    assert read_part("base") == read_part(str(base))


def test_weights_that_lie_still_are_read_once(models, monkeypatch):
    base, _ = models
    reads = []
    original = contents._update
    monkeypatch.setattr(contents, "_update", lambda digest, entry: (reads.append(entry), original(digest, entry)))
    weights = base / "model.safetensors"

    def aged(seconds):
        for file in (weights, base / "config.json"):
            os.utime(file, (time.time() - seconds,) * 2)

    aged(100)
    first = read_contents(base)
    assert read_contents(base) == first
    assert len(reads) == 3
    save_file({"layer.0": np.ones((3, 4), np.float32)}, weights)
    aged(50)
    assert read_contents(base).hash != first.hash
    assert len(reads) == 4


def test_signals_are_found_and_damaged_ones_named(signal, tmp_path):
    for name in ("b", "a"):
        write_signal(tmp_path / "all" / name, signal)
    edited(tmp_path / "all" / "b" / FILE)
    (first, good), (second, bad) = find_signals([str(tmp_path / "all")])
    assert first.endswith("a")
    assert good == signal
    assert second.endswith("b")
    assert isinstance(bad, SignalError)


VOCABULARY = {"a": 0, "b": 1, "<end>": 2}


def test_added_tokens_on_either_side_are_left_out():
    np.testing.assert_array_equal(shared_ids({**VOCABULARY, "<x>": 3}, {**VOCABULARY, "<y>": 7}), [0, 1, 2])
    assert vocabulary_hash(VOCABULARY) == vocabulary_hash(dict(reversed(VOCABULARY.items())))


def test_a_conflicting_id_is_named():
    with pytest.raises(VocabularyError, match=r"token id 1 is 'b' in p and 'c' in t \(1 of 3 ids conflict\)"):
        shared_ids(VOCABULARY, {"a": 0, "c": 1, "<end>": 2}, ("p", "t"))
