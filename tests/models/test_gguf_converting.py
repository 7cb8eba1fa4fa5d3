"""GGUF files converted to Orbax form: what is loaded is the same, bit for bit."""

import shutil

import jax
import numpy as np
import pytest

from jaxshare import models
from jaxshare.quantised import QuantisedTensor, is_quantised
from jaxshare.serving.cli.main import main
from tests.models import gguf_files
from tests.models.test_gguf import PARITY, TINY, with_tokenizer


def check_same(found: models.LoadedModel, expected: models.LoadedModel) -> None:
    assert found.config == expected.config and found.generation == expected.generation
    assert found.dtype == expected.dtype
    kept = jax.tree.structure(expected.params)
    assert jax.tree.structure(found.params) == kept
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)


def test_a_mixed_file_keeps_codes_and_scales(tmp_path):
    target = tmp_path / "model"
    assert main(["convert", str(TINY), str(target)]) == 0
    found = models.load(target)
    check_same(found, models.load(TINY))
    packed = [e for e in jax.tree.leaves(found.params, is_leaf=is_quantised) if is_quantised(e)]
    assert {each.format for each in packed} == {"int4", "int8"}
    assert all(isinstance(each, QuantisedTensor) for each in packed)
    # As `load` of the file, which has norms in float32.
    check_same(models.load(target, "float32"), models.load(TINY, "float32"))


@pytest.mark.parametrize(
    "case", ["gpt_oss_mqa_yarn_mxfp4", "gemma3_mha", "phi3_mqa_longrope_short_sharded"]
)
def test_architectures(case, tmp_path):
    file = gguf_files.write(PARITY / case, tmp_path / "model.gguf")
    target = tmp_path / "model"
    assert main(["convert", str(file), str(target)]) == 0
    check_same(models.load(target), models.load(file))


def test_tokenizer_and_settings_come_from_the_metadata(tmp_path):
    file = gguf_files.write(models.EMBEDDED, tmp_path / "model.gguf", more=with_tokenizer)
    target = tmp_path / "model"
    assert main(["convert", str(file), str(target)]) == 0
    found, expected = models.load(target), models.load(file)
    check_same(found, expected)
    assert found.generation.sampler.top_k == 20 and found.generation.stop_tokens == (2, 0)
    text = "What is 2 + 3?  <|im_end|>\n"
    assert found.tokenizer(text)["input_ids"] == expected.tokenizer(text)["input_ids"]
    assert found.tokenizer.chat_template == expected.tokenizer.chat_template


def test_a_folder_keeps_its_own_files(tmp_path):
    folder, target = tmp_path / "with-gguf", tmp_path / "model"
    shutil.copytree(models.EMBEDDED, folder)
    gguf_files.write(
        folder, folder / "model-BF16.gguf", lambda _, value: "BF16" if value.ndim > 1 else "F32"
    )
    (folder / "model.safetensors").unlink()
    assert main(["convert", str(folder), str(target)]) == 0
    check_same(models.load(target), models.load(folder))
    assert (target / "workers.json").read_bytes() == (folder / "workers.json").read_bytes()
    assert not [*target.glob("*.gguf")]
    # A plain one goes on to safetensors, whose numbers are those of the file.
    back = tmp_path / "back"
    assert main(["convert", str(target), str(back)]) == 0
    jax.tree.map(
        np.testing.assert_array_equal,
        models.load(back, "float32").params,
        models.load(folder, "float32").params,
    )


def test_what_is_refused(tmp_path, capsys):
    target = tmp_path / "model"
    assert main(["convert", str(TINY), str(target), "--quantize", "int8"]) != 0
    assert "in GGUF" in (said := capsys.readouterr().err) and "without --quantize first" in said
    short = tmp_path / "short.gguf"
    short.write_bytes(TINY.read_bytes()[:-1])
    assert main(["convert", str(short), str(target)]) != 0
    assert "short.gguf" in capsys.readouterr().err
    target.mkdir()
    assert main(["convert", str(TINY), str(target)]) != 0
    assert "exists" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "short.gguf"]
