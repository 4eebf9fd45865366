"""Where text encoders lie: on the device, or in host memory, from which each layer is copied to the device."""

from __future__ import annotations

import pytest
import torch
from second_device import playing
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from prep.errors import OutOfMemoryError
from prep.models.device import offload
from prep.models.device.memory import move
from prep.models.device.offload import EncoderPlacement, weight_bytes

IDS = torch.tensor([[1, 5, 7, 2], [1, 9, 2, 2]])


def clip():
    torch.manual_seed(0)
    return CLIPTextModel(CLIPTextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=1, eos_token_id=2, pad_token_id=2)).eval()


def t5():
    torch.manual_seed(0)
    return T5EncoderModel(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)).eval()


def devices(module):
    return {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}


def test_the_size_of_an_encoder_is_that_of_its_weights():
    encoder = clip()
    floats = sum(one.numel() for one in encoder.parameters())
    assert weight_bytes(encoder) - weight_bytes(encoder.bfloat16()) == 2 * floats


@pytest.mark.parametrize("make", [clip, t5])
def test_an_encoder_beyond_the_limit_stays_in_host_memory_and_computes_on_the_device(make):
    encoder = make()
    size = weight_bytes(encoder)
    with torch.inference_mode():
        wanted = encoder(IDS).last_hidden_state
    with playing() as there, torch.no_grad():
        whole = EncoderPlacement(there, size, "float32").place(make(), "text encoder 2")
        assert devices(whole) == {"meta"}
        placement = EncoderPlacement(there, size - 1, "float32")
        placed = placement.place(encoder, "text encoder 2")
        assert devices(placed) == {"cpu"}
        same = whole(IDS.to(there)).last_hidden_state.cpu()
        for _ in range(2):
            found = placed(IDS.to(there)).last_hidden_state
            assert found.device.type == "meta" and torch.equal(found.cpu(), same)
            assert devices(placed) == {"cpu"}, "the last layer has left the device, too"
    torch.testing.assert_close(same, wanted)  # the second device takes operators apart, which rounds differently
    (notice,) = placement.notices
    assert notice.startswith("the text encoder 2 (") and notice.endswith(
        ") is larger than --encoder-memory, so its layers are copied to meta one by one")


def test_an_encoder_in_host_memory_can_be_computed_in_another_dtype():
    encoder = clip()
    with torch.no_grad():
        wanted = encoder.double()(IDS).last_hidden_state
    with playing() as there, torch.no_grad():
        placed = EncoderPlacement(there, 0, "float32").place(clip(), "text encoder")
        placed.to(torch.float64)
        found = placed(IDS.to(there)).last_hidden_state.cpu()
    torch.testing.assert_close(found, wanted)


def test_a_layer_that_fails_gives_its_memory_back():
    encoder = clip()

    def fail(*_):
        raise torch.OutOfMemoryError

    with playing() as there, torch.no_grad():
        placed = EncoderPlacement(there, 0, "float32").place(encoder, "text encoder")
        handle = encoder.get_submodule("encoder.layers.1.mlp.fc1").register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            placed(IDS)
        assert devices(placed) == {"cpu"}
        handle.remove()
        assert placed(IDS).last_hidden_state.device.type == "meta", "inputs are moved, too"


@pytest.mark.parametrize("kind", ["cpu", "mps"])
def test_devices_that_share_the_memory_of_the_host_have_no_limit(kind, monkeypatch):
    monkeypatch.setattr(offload, "move", lambda model, *_, **__: model)
    placement, encoder = EncoderPlacement(torch.device(kind), 0, "float32"), clip()
    assert placement.place(encoder, "text encoder") is encoder
    (notice,) = placement.notices
    assert notice.startswith(f"--encoder-memory does nothing on {kind}, whose memory is that of the computer")
    assert not list(EncoderPlacement(torch.device(kind), None, "float32").notices)


def test_an_encoder_that_does_not_fit_is_told_the_option(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    encoder = clip()
    monkeypatch.setattr(encoder, "to", full)
    with pytest.raises(OutOfMemoryError) as caught:
        EncoderPlacement(torch.device("cuda"), None, "bfloat16").place(encoder, "text encoder")
    assert "--encoder-memory with fewer GiB than the device has" in caught.value.hint
    with pytest.raises(OutOfMemoryError) as caught:
        move(encoder, torch.device("cuda"), "the VAE", "bfloat16")
    assert "--encoder-memory" not in caught.value.hint
