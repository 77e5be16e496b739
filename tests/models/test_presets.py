import numpy as np
import pytest

from rlx.envs.chat import load_chat_tokenizer
from rlx.models import hf, presets
from rlx.models.spec import count_parameters
from tests import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model directory to take the tokenizer of."""
    return tiny_model.build(tmp_path_factory.mktemp("models") / "other")


def test_the_command_writes_a_model_that_loads(tmp_path, other, capsys):
    directory = tmp_path / "new" / "tiny"
    assert presets.main([str(directory), other]) == 0
    arch = hf.read_architecture(directory)
    assert arch == presets.tiny(tiny_tokenizer.VOCAB_SIZE)
    params = hf.load_params(directory, arch)
    assert 0.05 < np.std(params["embed"]) < 0.2
    assert load_chat_tokenizer(str(directory), "", "").vocab_size == arch.vocab_size
    assert f"{directory}: {count_parameters(arch):,} random parameters" in capsys.readouterr().out


def test_weights_are_a_function_of_the_seed(tmp_path):
    arch = presets.tiny(50)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        presets.write_random(tmp_path / name, arch, tokenizer_from=None, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_a_directory_without_a_tokenizer_is_named(tmp_path, capsys):
    assert presets.main([str(tmp_path / "tiny"), str(tmp_path)]) == 1
    assert f"error: {tmp_path}/tokenizer.json does not exist: name a model directory" in capsys.readouterr().err
    assert not (tmp_path / "tiny").exists()


def test_nothing_is_overwritten(tmp_path, other, capsys):
    assert presets.main([str(tmp_path), other]) == 1
    assert f"error: {tmp_path} exists" in capsys.readouterr().err
