"""The container of a GGUF: what the `gguf` package writes is read, what is damaged is refused by name."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxinfer.checkpoint import Checkpoint, read_sampling_defaults
from jaxinfer.checkpoint.stored import StoredBlocks, StoredQuantized
from jaxinfer.gguf import file as gguf_file
from jaxinfer.gguf.file import read_gguf
from jaxinfer.text.tokenizer import Tokenizer
from tests.gguf.gguf_files import TYPES, add_vocabulary, save_gguf
from tests.hostile.mutations import MUTATIONS, file_limits, mutated

SCALARS = {
    **{0: ("<B", 200), 1: ("<b", -3), 2: ("<H", 60_000), 3: ("<h", -300), 4: ("<I", 2**31), 5: ("<i", -70_000)},
    **{6: ("<f", 0.1), 7: ("<?", True), 10: ("<Q", 2**63), 11: ("<q", -(2**40)), 12: ("<d", 1e-300)},
}


def text(value: str | bytes) -> bytes:
    content = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(content)) + content


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + axes + struct.pack("<IQ", kind, offset)


def container(
    *, magic: bytes = b"GGUF", version: int = 3, keys: Any = (), tensors: Any = (), counts: Any = None, tail: int = 64
) -> bytes:
    num_tensors, num_keys = counts or (len(tensors), len(keys))
    header = magic + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join((*keys, *tensors))
    return header + bytes(-len(header) % 32) + bytes(tail)


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_kind_are_read(tmp_path, version):
    keys = [key(f"own.{kind}", kind, struct.pack(form, value)) for kind, (form, value) in SCALARS.items()]
    keys += [
        key(f"own.{kind}s", 9, struct.pack("<IQ", kind, 2) + 2 * struct.pack(form, value))
        for kind, (form, value) in SCALARS.items()
    ]
    keys += [key("own.text", 8, text("ü")), key("own.texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text(""))]

    metadata = read_gguf(written(tmp_path, container(version=version, keys=keys))).metadata

    for kind, (form, value) in SCALARS.items():
        assert metadata[f"own.{kind}"] == value
        assert type(metadata[f"own.{kind}"]) is type(value)
        np.testing.assert_array_equal(metadata[f"own.{kind}s"], np.array([value] * 2, form))
    assert metadata["own.text"] == "ü"
    assert metadata["own.texts"] == ("a", "")


def test_tensors_lie_where_the_package_puts_them(tmp_path):
    path, _ = save_gguf(tmp_path, "llama", lambda name: "Q4_K" if "ffn" in name else "Q8_0")
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}

    found = read_gguf(path).tensors

    assert found.keys() == expected.keys()
    for name, own in found.items():
        assert own.type.name == expected[name].tensor_type.name
        assert own.shape == tuple(int(n) for n in reversed(expected[name].shape))
        assert own.map().tobytes() == expected[name].data.tobytes()


DAMAGED = {
    "empty": (b"", "are no GGUF file"),
    "another format": (container(magic=b"PK\x03\x04"), "begins with"),
    "version 1": (container(version=1), "version 1, not 2 or 3"),
    "big-endian": (container(version=0x03000000), "version 3 in big-endian"),
    "cut in the counts": (container()[:20], "numbers at byte"),
    "more keys than bytes": (container(counts=(0, 2**62)), "keys at byte 24 are more"),
    "more tensors than bytes": (container(counts=(2**62, 0)), "tensors at byte 24 are more"),
    "a long string": (container(keys=[struct.pack("<Q", 2**63) + b"abcdefghijkl"]), "bytes at byte"),
    "a long array": (container(keys=[key("a", 9, struct.pack("<IQ", 4, 2**61))]), "numbers at byte"),
    "a long array of strings": (container(keys=[key("a", 9, struct.pack("<IQ", 8, 2**61))]), "strings at byte"),
    "an array of arrays": (container(keys=[key("a", 9, struct.pack("<IQ", 9, 1))]), "none or an array of arrays"),
    "an unknown kind": (container(keys=[key("a", 13, bytes(8))]), "a value of type 13"),
    "a truth value of 2": (container(keys=[key("a", 7, b"\x02")]), "a truth value of 2"),
    "bytes that are no text": (container(keys=[key("a", 8, text(b"\xff\xfe"))]), "is not UTF-8"),
    "a key twice": (container(keys=[key("a", 7, b"\x00")] * 2), "key 'a' is there twice"),
    "alignment 0": (container(keys=[key("general.alignment", 4, bytes(4))]), "general.alignment=0 is no power"),
    "alignment 48": (
        container(keys=[key("general.alignment", 4, struct.pack("<I", 48))]),
        "general.alignment=48 is no power",
    ),
    "a tensor twice": (container(tensors=[tensor("t"), tensor("t")]), "tensor 't' is there twice"),
    "no axes": (container(tensors=[tensor("t", ())]), "has 0 axes"),
    "five axes": (container(tensors=[tensor("t", (1,) * 5)]), "has 5 axes"),
    "an axis of 0": (container(tensors=[tensor("t", (0, 4))]), "is empty"),
    "an axis beyond the file": (container(tensors=[tensor("t", (2**40, 2**40))]), "beyond the file"),
    "an offset beyond the file": (container(tensors=[tensor("t", offset=2**60)]), "beyond the file"),
    "an offset between": (container(tensors=[tensor("t", offset=8)]), "no multiple of the alignment"),
    "tensors in each other": (container(tensors=[tensor("a", (16,)), tensor("b", offset=32)]), "begins inside 'a'"),
    "half a block": (container(tensors=[tensor("t", (33,), 8)]), "no whole blocks of Q8_0"),
    "an unread type": (container(tensors=[tensor("t", (256,), 16)]), "is of type IQ2_XXS, not one of F32"),
    "an unknown type": (container(tensors=[tensor("t", (256,), 99)]), "is of type 99"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name(tmp_path, case):
    content, message = DAMAGED[case]
    path = written(tmp_path, content)

    with pytest.raises(ValueError, match=message) as error:
        read_gguf(path)

    assert str(path) in str(error.value)


@pytest.mark.parametrize("what", ["keys", "tensors"])
def test_keys_and_tensors_have_bounds(tmp_path, monkeypatch, what):
    monkeypatch.setattr(gguf_file, f"MAX_{what.upper()}", 1)
    items: dict[str, Any] = {
        "keys": [key("a", 7, b"\x00"), key("b", 7, b"\x00")],
        "tensors": [tensor("a"), tensor("b", offset=32)],
    }

    with pytest.raises(ValueError, match=f"has 2 {what}, more than 1"):
        read_gguf(written(tmp_path, container(**{what: items[what]})))


def test_a_header_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 1000)

    with pytest.raises(ValueError, match="more than the rest of the header may have"):
        read_gguf(written(tmp_path, container(keys=[key("a", 8, text("x" * 2000))])))


def read_whole(path: Path) -> list[Any]:
    """Reads what an engine reads of a file."""
    checkpoint = Checkpoint(path)
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer is not None
    _, stored = checkpoint.plan(checkpoint.config)
    tensors = [stored[name] for name in sorted(stored)]
    floats = [tensor.floats() if isinstance(tensor, StoredQuantized) else tensor.map() for tensor in tensors]
    for tensor in tensors:
        if isinstance(tensor, StoredBlocks):
            tensor.blocks(slice(0, None))
    ids = tokenizer.encode("a cab")
    defaults = read_sampling_defaults(checkpoint)
    return [checkpoint.config, checkpoint.eos_token_ids, defaults, ids, *(f.tobytes() for f in floats)]


def refusal_of(path: Path) -> str | None:
    """Returns the error's message; None for a file that can be read."""
    try:
        read_whole(path)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", ["mixed", *TYPES])
def test_a_mutated_file_is_refused_by_name_or_read_whole(tmp_path, kind):
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256}
    kinds = {"ffn": "Q4_K", "attn": "Q8_0"}
    count = MUTATIONS if kind == "mixed" else 3 * MUTATIONS // 10
    path, _ = save_gguf(
        tmp_path,
        "llama",
        (lambda name: next((kind for part, kind in kinds.items() if part in name), "F16")) if kind == "mixed" else kind,
        add=add_vocabulary,
        vocab_size=97,
        **sizes,
    )
    content = path.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    rng, mutant = np.random.default_rng(0), tmp_path / "mutant.gguf"
    read_whole(path)
    num_refused = 0
    for _ in range(count):
        mutant.unlink(missing_ok=True)
        mutant.write_bytes(mutated(content, header, rng))
        with file_limits(mutant):
            message = refusal_of(mutant)
        assert message is None or str(mutant) in message, message
        num_refused += message is not None

    assert count / 2 < num_refused < count
