"""A LoRA of lower rank keeps the largest singular values of each layer, under the names and settings of its format."""

from __future__ import annotations

import json

import pytest
import torch
from lora_tensors import DOWN, UP, drawn, metadata
from safetensors.torch import load_file, save_file

from prep.errors import CacheError, ModelError, PathError, UsageError
from prep.fs.paths import MARKER
from train.merging.resize import ResizeRequest, resize
from train.models.adapters.peft import parse


def matrix(down, up, scale):
    return scale * (up.double().flatten(1) @ down.double().flatten(1))


def best(whole, rank):
    """The best approximation, by a decomposition of the whole product."""
    left, values, right = torch.linalg.svd(whole, full_matrices=False)
    return (left[:, :rank] * values[:rank]) @ right[:rank], float(values[:rank].norm() / values.norm())


def kohya(path, dtype=torch.float32, alpha=2.0):
    """A linear layer, a 1x1 and a 3x3 convolution, of rank 6; a text encoder's layer of rank 3."""
    shapes = {"lora_unet_a": ((6, 20), (10, 6)), "lora_unet_b": ((6, 12, 1, 1), (16, 6, 1, 1)),
              "lora_unet_c": ((6, 8, 3, 3), (12, 6, 1, 1)), "lora_te_text_model_d": ((3, 9), (9, 3))}
    tensors = {}
    for number, (stem, (down, up)) in enumerate(shapes.items()):
        tensors |= {stem + DOWN: drawn(*down, seed=2 * number, dtype=dtype),
                    stem + UP: drawn(*up, seed=2 * number + 1, dtype=dtype),
                    f"{stem}.alpha": torch.tensor(alpha, dtype=dtype)}
    save_file(tensors, path, {"ss_network_dim": "6", "ss_network_alpha": "2", "ss_base_model_version": "sd_v1",
                              "ss_network_args": json.dumps({"conv_dim": "6", "conv_alpha": "2", "algo": "lora"}),
                              "sshs_model_hash": "old", "sshs_legacy_hash": "old"})
    return tensors, [*shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_layer_is_the_best_of_its_rank(tmp_path, dtype):
    before, stems = kohya(tmp_path / "a.safetensors", dtype)
    done = resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "b.safetensors", rank=4))
    after = load_file(tmp_path / "b.safetensors")
    assert [*after] == sorted(before) and {value.dtype for value in after.values()} == {dtype}
    assert [each.layer for each in done.layers] == sorted(stems) and done.size == (
        tmp_path / "b.safetensors").stat().st_size
    off = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for each in done.layers:
        down, up = before[each.layer + DOWN], before[each.layer + UP]
        wanted, kept = best(matrix(down, up, 2 / len(down)), 4)
        found = matrix(after[each.layer + DOWN], after[each.layer + UP], 1.0)
        assert (found - wanted).norm() < off * wanted.norm() and each.kept == pytest.approx(kept)
        assert each.before == len(down) and each.rank == min(4, len(down)) == float(after[f"{each.layer}.alpha"])
        assert after[each.layer + DOWN].shape == (each.rank, *down.shape[1:])
        assert after[each.layer + UP].shape == (len(up), each.rank, *up.shape[2:])
    assert done.layers[0].kept == 1.0 and 0.5 < done.kept < 1
    facts = metadata(tmp_path / "b.safetensors")
    assert (facts["ss_network_dim"], facts["ss_network_alpha"], facts["ss_base_model_version"]) == ("4", "4.0", "sd_v1")
    assert json.loads(facts["ss_network_args"]) == {"conv_dim": "4", "conv_alpha": "4.0", "algo": "lora"}
    made = json.loads(facts["latentry.resized"])
    assert made["name"] == "a.safetensors" and len(made["sha256"]) == 64 and made["rank"] == 4
    assert made["kept"] == pytest.approx(done.kept, abs=1e-6)
    assert facts["sshs_model_hash"] not in ("old", "") and "sshs_legacy_hash" not in facts


def test_the_same_rank_adds_the_same(tmp_path):
    before, stems = kohya(tmp_path / "a.safetensors")
    done = resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "b.safetensors", rank=99))
    after = load_file(tmp_path / "b.safetensors")
    assert done.kept == pytest.approx(1.0)
    for stem in stems:
        wanted = matrix(before[stem + DOWN], before[stem + UP], 2 / len(before[stem + DOWN]))
        assert torch.allclose(matrix(after[stem + DOWN], after[stem + UP], 1.0), wanted, atol=1e-5)
    again = resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "c.safetensors", rank=99))
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()
    assert again.layers == done.layers


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.999, 1.0])
def test_a_part_to_keep_chooses_the_smallest_rank(tmp_path, keep):
    before, _ = kohya(tmp_path / "a.safetensors")
    done = resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "b.safetensors", keep=keep))
    assert done.kept >= keep - 1e-9
    for each in done.layers:
        whole = matrix(before[each.layer + DOWN], before[each.layer + UP], 1.0)
        assert best(whole, each.rank)[1] >= keep - 1e-9
        assert each.rank == 1 or best(whole, each.rank - 1)[1] < keep
    both = resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "c.safetensors", keep=keep, rank=2))
    assert [each.rank for each in both.layers] == [min(2, each.rank) for each in done.layers]


def test_tuckers_core_and_whole_differences_become_two_matrices(tmp_path):
    core, down, up = drawn(4, 4, 3, 3), drawn(4, 8, 1, 1, seed=1), drawn(6, 4, 1, 1, seed=2)
    difference = drawn(10, 14, seed=3)
    save_file({"lora_unet_a.lora_mid.weight": core, "lora_unet_a" + DOWN: down, "lora_unet_a" + UP: up,
               "lora_unet_b.diff": difference, "lora_unet_b.diff_b": drawn(10, seed=4),
               "lora_unet_c.diff": drawn(7, seed=5)}, tmp_path / "a.safetensors")
    done = resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "b.safetensors", rank=3))
    after = load_file(tmp_path / "b.safetensors")
    whole = torch.einsum("ijkl,oi,jc->ockl", core, up.flatten(1), down.flatten(1)).flatten(1)
    for stem, value in (("lora_unet_a", whole), ("lora_unet_b", difference)):
        wanted = best(value.double(), 3)[0]
        assert torch.allclose(matrix(after[stem + DOWN], after[stem + UP], 1.0), wanted, atol=1e-5)
    assert after["lora_unet_a" + DOWN].shape == (3, 8, 3, 3) and float(after["lora_unet_b.alpha"]) == 3
    assert torch.equal(after["lora_unet_b.diff_b"], drawn(10, seed=4))
    assert torch.equal(after["lora_unet_c.diff"], drawn(7, seed=5)) and len(done.layers) == 2
    assert not {"lora_unet_a.lora_mid.weight", "lora_unet_b.diff"} & after.keys()


def of_diffusers(path, component="transformer", **table):
    tensors = {f"{component}.{name}.lora_{kind}.weight": drawn(*shape, seed=number)
               for number, (name, kind, shape) in enumerate([("x.to_q", "A", (5, 12)), ("x.to_q", "B", (12, 5)),
                                                             ("y.to_q", "A", (2, 12)), ("y.to_q", "B", (12, 2))])}
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps(
        {f"{component}.{name}": value for name, value in table.items()})} if table else None)
    return tensors


@pytest.mark.parametrize("table", [{}, {"r": 5, "lora_alpha": 10, "rank_pattern": {"y.to_q": 2}, "use_rslora": True,
                                        "alpha_pattern": {"y.to_q": 3}, "target_modules": ["to_q"]}])
def test_diffusers_settings_are_those_of_the_new_ranks(tmp_path, table):
    """Without them alpha is the rank; with rslora alpha is divided by its root."""
    before = of_diffusers(tmp_path / "a.safetensors", **table)
    resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "b.safetensors", rank=4))
    after, facts = load_file(tmp_path / "b.safetensors"), metadata(tmp_path / "b.safetensors")
    assert [*after] == sorted(before)
    settings = json.loads(facts["lora_adapter_metadata"])
    read = parse({name.removeprefix("transformer."): value for name, value in settings.items()})
    assert settings["transformer.target_modules"] == (["to_q"] if table else ["x.to_q", "y.to_q"])
    for name, rank, scale in (("x.to_q", 4, 10 / 5**0.5), ("y.to_q", 2, 3 / 2**0.5)):
        down, up = (f"transformer.{name}.lora_{kind}.weight" for kind in "AB")
        wanted = best(matrix(before[down], before[up], scale if table else 1.0), rank)[0]
        assert torch.allclose(matrix(after[down], after[up], 1.0), wanted, atol=1e-4)
        assert len(after[down]) == rank and read.alpha_of(name, rank) == rank


def test_names_without_a_place_for_alphas_get_one_rank(tmp_path):
    """As ComfyUI's own: readers take the rank for alpha, and diffusers the first layer's for all."""
    before = {name.replace("transformer.", "diffusion_model."): value
              for name, value in of_diffusers(tmp_path / "other.safetensors").items()}
    save_file(before, tmp_path / "a.safetensors")
    done = resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "b.safetensors", rank=4))
    after = load_file(tmp_path / "b.safetensors")
    assert [each.rank for each in done.layers] == [4, 2]
    assert {len(value) for name, value in after.items() if "lora_A" in name} == {4}
    for name in "xy":
        down, up = (f"diffusion_model.{name}.to_q.lora_{kind}.weight" for kind in "AB")
        assert torch.allclose(matrix(after[down], after[up], 1.0), best(matrix(before[down], before[up], 1.0), 4)[0],
                              atol=1e-5)
    assert "lora_adapter_metadata" not in (metadata(tmp_path / "b.safetensors") or {})


def test_pefts_directory_becomes_another_that_peft_reads(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(12, 10), torch.nn.Conv2d(8, 6, 3)

    torch.manual_seed(0)
    base = Model()
    made = get_peft_model(base, LoraConfig(r=5, lora_alpha=7, target_modules=["first", "second"], use_rslora=True,
                                           rank_pattern={"second": 3}))
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "lora_" in name:
                value.copy_(drawn(*value.shape, seed=len(name)))
    made.save_pretrained(tmp_path / "peft")
    wanted = {name: made.base_model.model.get_submodule(name).get_delta_weight("default").detach()
              for name in ("first", "second")}
    resize(ResizeRequest(lora=tmp_path / "peft", output=tmp_path / "lower", rank=4))
    torch.manual_seed(0)
    found = PeftModel.from_pretrained(Model(), tmp_path / "lower")
    for name, rank in (("first", 4), ("second", 3)):
        delta = found.base_model.model.get_submodule(name).get_delta_weight("default")
        expected = best(wanted[name].double().flatten(1), rank)[0]
        assert torch.allclose(delta.double().flatten(1), expected, atol=1e-4)
    with pytest.raises(PathError, match="lower exists, expected a new directory for adapter_model"):
        resize(ResizeRequest(lora=tmp_path / "peft", output=tmp_path / "lower", rank=2, force=True))


def test_doras_lengths_stay(tmp_path):
    before, _ = kohya(tmp_path / "old.safetensors")
    lengths = drawn(10, 1, seed=9)
    save_file({**before, "lora_unet_a.dora_scale": lengths}, tmp_path / "a.safetensors")
    resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "b.safetensors", rank=2))
    assert torch.equal(load_file(tmp_path / "b.safetensors")["lora_unet_a.dora_scale"], lengths)


def test_factors_of_8_bits_become_bfloat16(tmp_path):
    save_file({"lora_unet_a" + DOWN: drawn(3, 8).to(torch.float8_e4m3fn), "lora_unet_a.alpha": torch.tensor(3),
               "lora_unet_a" + UP: drawn(8, 3, seed=1).to(torch.float8_e4m3fn), "bundle_emb.word": drawn(2, 2)},
              tmp_path / "a.safetensors")
    resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "b.safetensors", rank=2))
    found = load_file(tmp_path / "b.safetensors")
    assert found["lora_unet_a" + DOWN].dtype == torch.bfloat16 and float(found["lora_unet_a.alpha"]) == 2
    assert torch.equal(found["bundle_emb.word"], drawn(2, 2))


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"lora_unet_a.lokr_w1": (2, 2), "lora_unet_a.lokr_w2": (4, 4)}, ModelError,
     "has a LoKr of lora_unet_a, which is no product of two matrices"),
    ({"lora_unet_a.oft_blocks": (2, 4, 4)}, ModelError, "has the tensor 'lora_unet_a.oft_blocks', of OFT, BOFT or "
     "VeRA, which is no product of two matrices"),
    ({"model.diffusion_model.out.2.weight": (4, 4)}, ModelError, "expected names of a LoRA, like"),
    ({"lora_unet_a" + DOWN: (3, 8)}, ModelError, "has no tensor 'up' of lora_unet_a"),
    ({"lora_unet_a" + DOWN: (3, 8), "lora_unet_a" + UP: (8, 4)}, ModelError, r"with shape \[8, 4\], but "
     r"'lora_unet_a\.lora_down\.weight' with shape \[3, 8\]: their ranks differ"),
    ({"lora_unet_a" + DOWN: (3,), "lora_unet_a" + UP: (8, 3)}, ModelError, r"of F32 with shape \[3\], expected a "
     "matrix of floats"),
    ({"lora_unet_a" + DOWN: (3, 8), "lora_unet_a" + UP: (8, 3), "lora_unet_a.alpha": (2,)}, ModelError,
     r"with shape \[2\], expected one number"),
    ({"lora_unet_a.diff": (8,)}, ModelError, "has no layer whose rank could be lowered"),
    ({}, ModelError, "has no layer whose rank could be lowered")])
def test_what_has_no_rank_is_refused(tmp_path, changes, error, message):
    save_file({name: drawn(*shape) for name, shape in changes.items()}, tmp_path / "a.safetensors")
    with pytest.raises(error, match=message):
        resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=tmp_path / "b.safetensors", rank=2))
    assert not (tmp_path / "b.safetensors").exists()


def test_damaged_files_are_refused(tmp_path):
    before, _ = kohya(tmp_path / "a.safetensors")
    save_file({**before, "lora_unet_a" + UP: before["lora_unet_a" + UP] * float("nan")}, tmp_path / "nan.safetensors")
    message = r"has NaN or infinity in 'lora_unet_a\.lora_up\.weight': what wrote it had failed"
    with pytest.raises(ModelError, match=message):
        resize(ResizeRequest(lora=tmp_path / "nan.safetensors", output=tmp_path / "b.safetensors", rank=2))
    (tmp_path / "half.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-9])
    with pytest.raises(CacheError, match="expected"):
        resize(ResizeRequest(lora=tmp_path / "half.safetensors", output=tmp_path / "b.safetensors", rank=2))


def test_nothing_is_replaced_without_being_told(tmp_path):
    kohya(tmp_path / "a.safetensors")
    there = tmp_path / "b.safetensors"
    there.write_bytes(b"mine")
    with pytest.raises(PathError, match="exists, so it is not replaced") as caught:
        resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=there, rank=2))
    assert "--force" in caught.value.hint and there.read_bytes() == b"mine"
    resize(ResizeRequest(lora=tmp_path / "a.safetensors", output=there, rank=2, force=True))
    assert len(load_file(there)) == 12
    with pytest.raises(PathError, match="is what is read"):
        resize(ResizeRequest(lora=there, output=there, rank=1, force=True))
    with pytest.raises(UsageError, match=r"has no name of a LoRA file, expected one that ends in \.safetensors"):
        resize(ResizeRequest(lora=there, output=tmp_path / "b", rank=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
    (tmp_path / MARKER).write_text("{}")
    (tmp_path / "shards").mkdir()
    with pytest.raises(PathError, match=r"c\.safetensors lies in a cache"):
        resize(ResizeRequest(lora=there, output=tmp_path / "c.safetensors", rank=1))


def test_the_command_lists_what_each_layer_keeps(train, tmp_path):
    kohya(tmp_path / "a.safetensors")
    result = train("resize", tmp_path / "a.safetensors", "-o", tmp_path / "b.safetensors", "--rank", 2)
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split() == ["rank", "norm", "kept", "layer"] and len(lines) == 6
    assert lines[1].split()[0] == "3->2" and lines[1].endswith("lora_te_text_model_d")
    assert lines[-1].startswith(f"wrote {tmp_path / 'b.safetensors'}: 4 layers, ") and "of the whole change kept" in (
        lines[-1])
    result = train("resize", tmp_path / "a.safetensors", "-o", tmp_path / "c.safetensors", "--keep", "0.9", "--json")
    found = json.loads(result.out)
    assert found["format"] == "latentry/resize" and found["keep"] == 0.9 and len(found["layers"]) == 4
    result = train("resize", tmp_path / "a.safetensors", "-o", tmp_path / "d.safetensors")
    assert result.code == 2 and "--rank and --keep are missing, expected one of them" in result.err
