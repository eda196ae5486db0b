"""A checkpoint whose configuration and headers are read once: its model, tensors, parameters, end tokens, digest."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxinfer.checkpoint.config_json.family import Family, embedding_name, is_backbone, is_classifier
from jaxinfer.checkpoint.families import family_of
from jaxinfer.checkpoint.formats import logical_tensors, settings_of, without_settings
from jaxinfer.checkpoint.formats.cache_scales import has_cache_scales, with_cache_scales
from jaxinfer.checkpoint.formats.elsewhere import READ, settings_beside, unread_format
from jaxinfer.checkpoint.formats.gguf import describe_changed, gguf_tensors, settings_of_gguf
from jaxinfer.checkpoint.huggingface import DOWNLOADED, gguf_files, read_headers, read_json, resolve_checkpoint
from jaxinfer.checkpoint.making.assemblies import assemblies_of, grid_of, is_assembly, plan_assembly, turned_as_stored
from jaxinfer.checkpoint.making.grouping import Packing, grouped, packings_of
from jaxinfer.checkpoint.making.misfits import (
    UNEMBEDDING,
    expected_shapes,
    have_equal_values,
    refuse_misfits,
    unread_keys_and_values,
    with_prefix,
)
from jaxinfer.checkpoint.making.reading import REPACKED_BYTES, abstract, assemble
from jaxinfer.checkpoint.safetensors_file import StoredTensor
from jaxinfer.checkpoint.state_head import CLASSIFIER_WEIGHT, MODULES_FILE, StateHead, read_state_head
from jaxinfer.checkpoint.stored import Blocks, Stored
from jaxinfer.config import require_quantization
from jaxinfer.device import joins_products, packs_integers, scans_layers
from jaxinfer.display.progress import Bar
from jaxinfer.gguf.file import GGUFFile, is_gguf, read_gguf
from jaxinfer.gguf.names import config_of
from jaxinfer.model.config import ModelConfig
from jaxinfer.model.joined_params import join_products
from jaxinfer.model.params import Params, abstract_params, over_mesh, shardings
from jaxinfer.model.quantized_params import quantize_weights
from jaxinfer.validation import MAX_INT, is_int

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


def name_of(model: str | Path | None) -> str:
    """Returns the name of a model in requests: that of its folder or file, or its Hub id; None is the bundled model."""
    if model is None:
        return "tiny"
    path = Path(model)
    return path.resolve().name if path.exists() else str(model)


def open_checkpoint(path_or_id: str | Path | Checkpoint, patterns: Sequence[str] = DOWNLOADED) -> Checkpoint:
    """Returns the checkpoint at the place that `resolve_checkpoint` finds, or the given one; opens no file yet.

    Of a local folder with one GGUF file and no config.json it is that file.
    """
    if isinstance(path_or_id, Checkpoint):
        return path_or_id
    place = resolve_checkpoint(path_or_id, patterns)
    is_local = Path(path_or_id).expanduser() == place  # what was downloaded of a repository is a part of its files
    has_config = (place / CONFIG_FILE).is_file()
    if is_local and place.is_dir() and not has_config and len(files := gguf_files(place)) == 1:
        place = files[0]
    return Checkpoint(place)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A folder of safetensors or a GGUF file. Its configuration and headers are read once, at their first use.

    Each use raises ValueError for a file that is damaged or missing, and for what cannot be honoured in it.
    """

    path: Path

    @property
    def settings(self) -> dict[str, Any]:
        """config.json as that of a model in floating point; a GGUF has it in its metadata."""
        return self._settings_and_packing[0]

    @property
    def packing(self) -> Mapping[str, Any] | None:
        """The settings of the format that packs the weights; None if they are floating point."""
        return self._settings_and_packing[1]

    @property
    def config_file(self) -> Path:
        return self.path if is_gguf(self.path) else self.path / CONFIG_FILE

    @property
    def family(self) -> Family:
        return family_of(self.settings)

    @cached_property
    def config(self) -> ModelConfig:
        """The model. If its tensors are there too, they decide on its unembedding: its own, the embedding, or none."""
        config = self.stated_config
        if is_backbone(self.settings):
            return config
        try:
            stored = self.stored
        except ValueError:  # none are there, or `plan` says what is wrong with them
            return config
        return self._with_stored_unembedding(config, stored)

    @property
    def stated_config(self) -> ModelConfig:
        """The model as config.json alone describes it."""
        try:
            config = self.family.config_from_hf(self.settings)
            config = with_cache_scales(config) if has_cache_scales(self.packing) else config
        except ValueError as error:
            raise ValueError(f"{self.config_file}: {error}") from None
        return replace(config, has_logits=False) if is_backbone(self.settings) else config

    @cached_property
    def gguf(self) -> GGUFFile | None:
        """The contents of a GGUF file, None for a folder."""
        return read_gguf(self.path) if is_gguf(self.path) else None

    @cached_property
    def headers(self) -> dict[str, StoredTensor]:
        """Every tensor of a folder, by its name there. What an index leaves out belongs to it if the model lacks it."""
        named, others = read_headers(self.path)
        return named | (self._lacking(named, others) if others else {})

    @property
    def stored(self) -> dict[str, Stored]:
        """The model's tensors by name, packed weights as integers."""
        return self._stored_and_states[0]

    @cached_property
    def _stored_and_states(self) -> tuple[dict[str, Stored], dict[Path, tuple[int, int]]]:
        """The tensors, and the state of each file that they lie in."""
        try:
            if self.gguf is not None:
                return gguf_tensors(self.gguf), {self.path: _state_of(self.path)}
            states = {file: _state_of(file) for file in {tensor.path for tensor in self.headers.values()}}
            return logical_tensors(self.headers, self.packing), states
        except ValueError as error:
            raise _from_file(self.path, error) from None

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json of a folder; {} without one."""
        file = self.path / GENERATION_FILE
        return read_json(file) if file.is_file() else {}

    @cached_property
    def head(self) -> StateHead:
        """What the checkpoint computes from the states of a text: vectors, labels or scores."""
        if self.gguf is not None:
            return StateHead()
        return read_state_head(self.path, self.settings, lambda: self.stored, self.config.hidden_size)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: generation_config.json's, else config.json's or the GGUF's, else none.

        In a checkpoint of several models those of the text model count as config.json's too.
        """
        generation = self.path / GENERATION_FILE
        for file in [self.config_file] if self.gguf is not None else [generation, self.config_file]:
            stated = self.generation_config if file == generation else self.settings if file.is_file() else {}
            text_model = stated.get("text_config")
            places = (stated, text_model) if isinstance(text_model, dict) else (stated,)
            value = next((place["eos_token_id"] for place in places if place.get("eos_token_id") is not None), None)
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(is_int(i) and 0 <= i <= MAX_INT for i in ids):
                raise ValueError(
                    f"eos_token_id={value!r} in {file} is not a token id or a list of them; correct the file"
                )
            return tuple(ids)
        return ()

    def plan(self, config: ModelConfig) -> tuple[Params, dict[str, Stored]]:
        """Returns how `Params` are made, an `Assembly` in the place of each tensor, and the stored tensors by name.

        Raises one ValueError that lists every missing, unexpected or mis-shaped tensor, and ValueError if a file has
        changed since its header was read.
        """
        for file, state in self._stored_and_states[1].items():
            if _state_of(file) != state:
                raise ValueError(f"{file} has changed since it was opened; load the checkpoint again")
        if config not in self._plans:  # a start asks for one and the same several times
            self._plans[config] = self._new_plan(config)
        return self._plans[config]

    @cached_property
    def _plans(self) -> dict[ModelConfig, tuple[Params, dict[str, Stored]]]:
        return {}

    def _new_plan(self, config: ModelConfig) -> tuple[Params, dict[str, Stored]]:
        family, stored = self.family, self.stored
        weights = family.weights_among(stored)
        plan, unread = plan_assembly(config, weights), unread_keys_and_values(config, weights)
        stored = with_prefix(stored, {*expected_shapes(plan), *unread}, family.prefix)
        plan = turned_as_stored(plan, stored, family.turned)
        of_head = (CLASSIFIER_WEIGHT,) if is_classifier(self.settings) else ()
        own = _without(stored, (*family.skipped, *family.draft_prefixes(self.settings), *unread, *of_head))
        if config.has_tied_embeddings and plan.embedding.names[0] not in own:
            # The one tensor may have either name.
            names = [name for name in own if name.endswith(UNEMBEDDING)] or plan.embedding.names
            plan = replace(plan, embedding=replace(plan.embedding, names=tuple(names[:1])))
        needs_unembedding = config.has_logits and not config.has_tied_embeddings
        way_out = None if self.gguf is not None else unread_format(self.path, self.settings)
        refuse_misfits(self.path, plan, own, needs_unembedding=needs_unembedding, way_out=way_out)
        return plan, stored

    def load(
        self,
        dtype: str,
        *,
        layer_cuts: Collection[int] = (),
        quantization: str | None = None,
        mesh: Mesh | None = None,
        show_progress: bool = False,
    ) -> tuple[Params, ModelConfig]:
        """Returns what `load_checkpoint` returns."""
        require_quantization(quantization)
        config = over_mesh(self.grouped(self.config, layer_cuts, scans=scans_layers(), mesh=mesh), mesh)
        placement = None if mesh is None else shardings(config, mesh)
        options: dict[str, Any] = {"quantization": quantization, "placement": placement}
        params = self.load_params(config, dtype, show_progress=show_progress, **options)
        return join_products(params, config) if joins_products() else params, config

    def load_params(
        self,
        config: ModelConfig,
        dtype: Any,
        *,
        placement: Params | None = None,
        quantization: str | None = None,
        show_progress: bool = False,
    ) -> Params:
        """Reads the parameters as `dtype`, one tensor of `Params` at a time.

        Each is on its devices before the next is read, so the host holds one stacked group of one weight at most. If
        `placement` (see `jaxinfer.model.params.shardings`) splits a weight, the host holds only the slices of its own
        devices. Every missing, unexpected or mis-shaped tensor is listed in one ValueError before any
        is read. Those of other models in the checkpoint, such as a tower for images, are skipped, and logged once as a
        warning. `config` is `self.config`, with any `layer_groups`. With `quantization` ("int8", "int4") weights are
        rounded on the host, some rows at a time.
        """
        self._refuse_both(quantization)
        plan, stored = self.plan(config)
        path = self.path
        skipped = [name for name in stored if name.startswith(self.family.skipped)]
        if (
            config.has_logits
            and not config.has_tied_embeddings
            and self.family.config_from_hf(self.settings).has_tied_embeddings
        ):
            logger.warning(
                "%s: %s differs from %s, so both are used, as transformers does; set tie_word_embeddings to false in"
                " config.json",
                *(path, plan.unembedding.names[0], plan.embedding.names[0]),
            )
        if skipped:
            towers = ", ".join(sorted({name.removeprefix("model.").partition(".")[0] for name in skipped}))
            logger.warning("%s: loads the text model alone, without %d tensors of %s", path, len(skipped), towers)
        if self.gguf is not None:
            self._say_what_blocks_become(plan, stored, jnp.dtype(dtype))
        if placement is not None and jax.tree.structure(placement) != jax.tree.structure(plan, is_leaf=is_assembly):
            raise ValueError(
                f"placement does not have the tensors of a model with layer_groups={config.layer_groups};"
                " build it from the config that is given here"
            )
        options = {"placement": placement, "quantization": quantization, "show_progress": show_progress}
        try:
            return read_tensors(plan, stored, dtype, **options)
        except ValueError as error:
            raise _from_file(self.path, error) from None

    def _say_what_blocks_become(self, plan: Params, stored: Mapping[str, Stored], dtype: Any) -> None:
        """Logs a warning for the blocks of a GGUF that are not held as they are, with rough bytes."""
        assert self.gguf is not None
        names: dict[bool, list[str]] = {False: [], True: []}
        for assembly in assemblies_of(plan):
            grid = grid_of(assembly, stored)
            if grid is None or (isinstance(grid, Blocks) and not packs_integers()):
                names[grid is not None] += assembly.names
        repacked = "integers of 8 bits, for no kernel of a TPU reads such blocks"
        for is_packed, becomes, size in ((False, dtype.name, dtype.itemsize), (True, repacked, REPACKED_BYTES)):
            if line := describe_changed(self.gguf, names[is_packed], becomes, size):
                logger.warning("%s: %s", self.path, line)

    def abstract(
        self, dtype: str, *, quantization: str | None = None, mesh: Mesh | None = None
    ) -> tuple[Params, ModelConfig]:
        """Returns what `load` returns, with a `jax.ShapeDtypeStruct` per tensor, none joined, without shardings.

        It needs config.json alone, and of packed weights the headers of their files.
        """
        require_quantization(quantization)
        config = over_mesh(self.grouped(self.config, scans=scans_layers(), mesh=mesh), mesh)
        options: dict[str, Any] = {"quantization": quantization, "is_packed": packs_integers()}
        return self.abstract_params(config, dtype, **options), config

    def abstract_params(
        self, config: ModelConfig, dtype: str, *, quantization: str | None = None, is_packed: bool = True
    ) -> Params:
        """Returns a `jax.ShapeDtypeStruct` per tensor of a model that is `self.config` in any groups, on any mesh.

        With `is_packed` two integers of 4 bits share a byte, as on all devices but a TPU.
        """
        if self.packing is not None:
            self._refuse_both(quantization)
            plan, stored = self.plan(config)
            shapes = partial(abstract, stored=stored, dtype=jnp.dtype(dtype), packs_integers=is_packed)
            return jax.tree.map(shapes, plan, is_leaf=is_assembly)
        params = abstract_params(config, dtype)
        if quantization is None:
            return params
        options: dict[str, Any] = {"config": config, "quantization": quantization, "is_packed": is_packed}
        return jax.eval_shape(partial(quantize_weights, **options), params)

    def packings(self, config: ModelConfig) -> list[Packing]:
        """Returns how the tensors of each layer are packed."""
        if self.packing is None:
            return [()] * config.num_layers
        plan, stored = self.plan(config.regrouped((1,) * config.num_layers))
        return packings_of(plan.layers, stored)

    def forget(self) -> None:
        """Frees what was read but the digests of files; a later use reads it again."""
        for name in vars(self).keys() - {"path", "_digests"}:
            del vars(self)[name]

    def digest(self, others: Iterable[str] = ()) -> str:
        """Returns a digest of all weights, of config.json and of the `others` that are there; or of the one file.

        It is that of the same files under any other name and place. The first call reads every byte, at the speed of
        the disk or 1 GB/s. Later ones read the files whose size or time of change is another one.
        """
        files = [self.path]
        if not self.path.is_file():
            files = sorted([self.config_file, *self.path.glob("*.safetensors"), *self._present(others)])
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
            digests = list(pool.map(self._digest_of, files))
        whole = hashlib.blake2b(digest_size=32)
        for file, digest in zip(files, digests, strict=True):
            whole.update(f"{file.name} {digest}\n".encode())
        return whole.hexdigest()

    def _digest_of(self, file: Path) -> str:
        state = _state_of(file)
        known_state, digest = self._digests.get(file, (None, ""))
        if known_state != state:
            # A change while it is read has another time than `state`, so the next call reads the file again.
            digest = _digest(file)
            self._digests[file] = state, digest
        return digest

    @cached_property
    def _digests(self) -> dict[Path, tuple[tuple[int, int], str]]:
        """The digest of each file that was read, with the state that the file had before."""
        return {}

    def file_sizes(self, others: Iterable[str] = ()) -> list[tuple[str, int]]:
        """Returns names and bytes of the files that have the model, and of the `others` that are there."""
        files = {self.path}
        if not self.path.is_file():
            files = {self.config_file, *(tensor.path for tensor in self.headers.values()), *self._present(others)}
        return sorted((file.name, file.stat().st_size) for file in files)

    def _lacking(
        self, named: Mapping[str, StoredTensor], others: Mapping[str, StoredTensor]
    ) -> dict[str, StoredTensor]:
        """Returns those of the other tensors that the model needs beside the named ones, as parts of packed weights."""
        weights, prefix = self.family.weights_among(named), self.family.prefix
        expected = expected_shapes(plan_assembly(self.family.config_from_hf(self.settings), weights))
        present = {module for name in named for module in (_module(name), prefix + _module(name))}
        modules = {_module(name) for name in expected} - present

        def is_lacking(name: str) -> bool:
            is_other_kind = name in expected and not name.endswith(".weight")  # such as a bias
            return is_other_kind or _module(name) in modules

        return {name: tensor for name, tensor in others.items() if is_lacking(name) or is_lacking(prefix + name)}

    def _present(self, names: Iterable[str]) -> list[Path]:
        return [self.path / name for name in names if (self.path / name).is_file()]

    @cached_property
    def _settings_and_packing(self) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
        try:
            if self.gguf is not None:
                return config_of(self.gguf), settings_of_gguf(self.gguf)
            hf = read_json(self.config_file)
            return without_settings(hf), settings_of(hf) or self._settings_beside()
        except ValueError as error:
            raise _from_file(self.config_file, error) from None

    def _settings_beside(self) -> Mapping[str, Any] | None:
        if not any((self.path / name).is_file() for name in READ):
            return None
        try:
            stored, _ = read_headers(self.path)
        except ValueError:  # none are there, or `plan` says what is wrong with them
            return None
        return settings_beside(self.path, stored)

    def grouped(
        self,
        config: ModelConfig,
        layer_cuts: Collection[int] = (),
        *,
        scans: bool,
        mesh: Mesh | AbstractMesh | None = None,
    ) -> ModelConfig:
        """Returns a model of this checkpoint in the groups of a device, see `making.grouping`."""
        return grouped(config, self.packings(config), layer_cuts, scans=scans, mesh=mesh)

    def _refuse_both(self, quantization: str | None) -> None:
        """Raises ValueError for a `quantization` of a checkpoint that is packed already."""
        if quantization is not None and self.packing is not None:
            raise ValueError(
                f"quantization={quantization!r} does not go with {self.path}, whose weights are packed already by"
                f" {self.packing['quant_method']}; leave it out"
            )

    def _with_stored_unembedding(self, config: ModelConfig, stored: Mapping[str, Stored]) -> ModelConfig:
        family = self.family
        own = _without(stored, (*family.skipped, *family.draft_prefixes(self.settings)))
        name = embedding_name(family.weights_among(own))
        embedding, unprefixed = own.get(name), own.get(name.removeprefix(family.prefix))
        unembeddings = [tensor for name, tensor in own.items() if name.endswith(UNEMBEDDING)]
        if config.has_tied_embeddings:
            # transformers ties them only if they are equal.
            stated = embedding or unprefixed
            are_tied = stated is None or all(have_equal_values(stated, tensor) for tensor in unembeddings)
            return config if are_tied else replace(config, has_tied_embeddings=False)
        # Embedding models may state the architecture of the language model that they come from.
        is_backbone_alone = (embedding is None and unprefixed is not None) or (self.path / MODULES_FILE).is_file()
        return replace(config, has_logits=bool(unembeddings) or not is_backbone_alone)


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _from_file(file: Path, error: ValueError) -> ValueError:
    """Returns the error with the file's name before its message, if it is not there yet."""
    names = (f"{file}:", f"{file} ", f"{file}/", f"{file.parent} ")  # a tensor's name may begin like a folder's
    return error if str(error).startswith(names) else ValueError(f"{file}: {error}")


def _state_of(file: Path) -> tuple[int, int]:
    """Returns size and time of change."""
    state = file.stat()
    return state.st_size, state.st_mtime_ns


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()


def _without(stored: Mapping[str, Stored], prefixes: tuple[str, ...]) -> dict[str, Stored]:
    return {name: tensor for name, tensor in stored.items() if not name.startswith(prefixes)}


def read_tensors(
    plan: Any,
    stored: Mapping[str, Stored],
    dtype: Any,
    *,
    placement: Any = None,
    quantization: str | None = None,
    show_progress: bool = False,
) -> Any:
    """Returns a tree with a tensor in the place of each `Assembly` of the plan; options are those of `load_params`."""
    assemblies, structure = jax.tree.flatten(plan, is_leaf=is_assembly)
    shardings = [None] * len(assemblies) if placement is None else jax.tree.leaves(placement)
    dtype, options = jnp.dtype(dtype), {"quantization": quantization, "packs_integers": packs_integers()}
    num_tensors = sum(len(assembly.names) for assembly in assemblies)
    with Bar(num_tensors, unit="tensor", description="loading", show=show_progress) as bar:
        leaves = []
        for assembly, sharding in zip(assemblies, shardings, strict=True):
            leaves.append(assemble(assembly, stored, dtype, sharding, **options))
            bar.update(len(assembly.names))
    return jax.tree.unflatten(structure, leaves)
