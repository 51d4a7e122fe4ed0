"""Loads and saves Hugging Face model folders, with errors that tell a user what to do."""

import logging
import os
import pickle
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import is_flash_attn_2_available, logging as transformers_logging

from turnwise.errors import ModelError, TurnwiseError, first_line, nearest
from turnwise.model_files.folder import (
    NO_TOKENIZER,
    NOTHING,
    Trust,
    base_of_adapter,
    check_adapter,
    check_folder,
    has_tokenizer,
    read_object,
    require_plain_folder,
)
from turnwise.model_files.sizes import require_rows, text_sizes
from turnwise.models.adapter_merge import NOT_MERGED, is_value_adapter, merge_adapter
from turnwise.models.file_tensors import check_tensor_types, require_weights, unexpected_tensors
from turnwise.models.packed_attention import PACKED_ATTENTION, supports_packing
from turnwise.runtime.disk import writing
from turnwise.runtime.info import PolicyInfo
from turnwise.runtime.replaceable import require_replaceable

logger = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ATTENTION = {"auto": None, "sdpa": "sdpa", "eager": "eager", "fa2": "flash_attention_2"}
# prefix of the modules that transformers makes from a model folder's Python files
_REMOTE_MODULES = "transformers_modules."
_MANY_WITHOUT_TOKEN = 0.05  # largest share of ids without a token that still looks like padding


def parse_dtype(name: str) -> torch.dtype:
    """The dtype that a config names. Raises ModelError if the name is unknown."""
    if name not in DTYPES:
        raise ModelError(
            f"dtype {name!r} is unknown; allowed are {', '.join(DTYPES)}.{nearest(name, DTYPES)}"
        )
    return DTYPES[name]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str = "auto",
    trust: Trust = NOTHING,
) -> PreTrainedModel:
    """A causal language model in evaluation mode, from a folder or the hub, with weights of `dtype` on
    `device`. From the folder of a LoRA adapter, it is the base model with the adapter merged in; the merge is
    computed in fp32.

    With `attn_implementation="auto"` sequences are packed without padding where the architecture allows it;
    `sdpa` and `eager` pad; `fa2` is flash attention 2 and needs CUDA. Raises ModelError if the folder is
    missing or holds no causal language model, its config is unreadable, the weights aren't the model's, or
    the attention can't run here."""
    folder = trust.folder(path)
    base = base_of_adapter(folder)
    if base is not None:
        if is_value_adapter(folder):
            raise ModelError(
                f"{path} is the adapter of a critic, which has a value head and writes no text; name a "
                "policy's"
            )
        check_adapter(folder)
        model = load_model(base, device=device, attn_implementation=attn_implementation, trust=trust)
        with told_as_one_sentence(folder, NOT_MERGED):
            merge_adapter(model, folder)
        logger.info("%s holds an adapter: merged into its base model %s", path, base)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model
    config = load_model_config(folder, trust)
    model, missing, unexpected = load_pretrained(
        AutoModelForCausalLM,
        folder,
        config,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust=trust,
    )
    require_weights(path, missing, unexpected)
    return model


def load_pretrained(
    kind: type[PreTrainedModel] | type[AutoModelForCausalLM],
    path: str | Path,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attn_implementation: str = "auto",
    trust: Trust = NOTHING,
) -> tuple[PreTrainedModel, list[str], list[str]]:
    """A model of the transformers class `kind`, loaded as in `load_model`; the sorted names of its tensors
    that the weight files lack; and those of the files' tensors that it doesn't have. Raises ModelError if the
    folder doesn't fit the class, tensors don't hold real numbers, or the attention can't run here."""
    require_plain_folder(path)
    implementation = resolved_attention(attn_implementation)
    kind_name = "causal language model" if kind is AutoModelForCausalLM else kind.__name__
    has_tensors = any(Path(path).glob("*.safetensors"))
    if trust.pickle and not has_tensors:
        logger.warning("%s: its weights are read from a pickle (allow_pickle: true)", path)
    with told_as_one_sentence(path, f"can't be loaded as a {kind_name}"), quiet():
        model, report = kind.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=implementation,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=trust.remote_code,
            use_safetensors=has_tensors or not trust.pickle,
            ignore_mismatched_sizes=True,
        )
    for name, saved, expected in sorted(report["mismatched_keys"]):
        is_head = kind is not AutoModelForCausalLM and not name.startswith(f"{model.base_model_prefix}.")
        reason = (
            "for one label, which is what a critic and a reward model have" if is_head else "by config.json"
        )
        raise ModelError(
            f"{path}: {name} is {_shape(saved)} in the weights and {_shape(expected)} {reason}; they don't "
            "fit"
        )
    check_tensor_types(path, Path(path), model)
    unexpected = unexpected_tensors(model, report["unexpected_keys"])
    if attn_implementation == "auto" and supports_packing(model):
        model.set_attn_implementation(PACKED_ATTENTION)
    return model.to(device).eval(), sorted(report["missing_keys"]), unexpected


def load_tokenizer(path: str | Path, trust: Trust = NOTHING) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. An adapter without a tokenizer gets that of its base model. Raises
    ModelError if `check_folder` refuses the folder, if it holds no usable tokenizer or no chat template, or
    if a token has no row of embeddings."""
    folder = trust.folder(path)
    base = base_of_adapter(folder)
    has_files = has_tokenizer(folder)
    if base is None:
        check_folder(folder, trust)
    elif not has_files:
        return load_tokenizer(base, trust)
    missing = f"{path}: {NO_TOKENIZER}"
    if not has_files:
        raise ModelError(missing)
    with told_as_one_sentence(path, "has no usable tokenizer (tokenizer.json, config.json)"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust.remote_code
        )
        ids = tokenizer.get_vocab().values()
    if not ids:
        raise ModelError(missing)
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{path}: the tokenizer has no chat template; use an instruct model, "
            "or add `chat_template` to its tokenizer_config.json"
        )
    _check_vocabulary(path, trust, set(ids))
    return tokenizer


def _check_vocabulary(path: str | Path, trust: Trust, ids: Collection[int]) -> None:
    """Raises ModelError if a token has no row in the embedding, and warns if many rows have no token. Such
    rows aren't masked in sampling, since sampler and trainer would then differ; a trained model hardly ever
    samples them."""
    num_rows = text_sizes(read_object(base_folder(path, trust) / "config.json")).get("vocab_size")
    require_rows(path, num_rows, max(ids) + 1)
    without = num_rows - len(ids) if isinstance(num_rows, int) else 0
    if without > _MANY_WITHOUT_TOKEN * (num_rows or 0):
        logger.warning(
            "%s: %d of %d ids of its vocabulary have no token, and such an id has no text if it is sampled; "
            "use the tokenizer that belongs to the weights",
            path,
            without,
            num_rows,
        )


def policy_info(
    path: str, dtype: str, max_context: int, attention: str = "auto", trust: Trust = NOTHING
) -> PolicyInfo:
    """The description of a policy, made without reading its weights. Raises ModelError if its files can't be
    used."""
    folder = base_folder(path, trust)
    config = load_model_config(folder, trust)
    with told_as_one_sentence(path, "has no usable generation config (generation_config.json)"):
        if (folder / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(folder, local_files_only=True)
        else:
            generation = GenerationConfig.from_model_config(config)
    vocab_size = config.get_text_config().vocab_size
    return PolicyInfo(path, vocab_size, stop_token_ids(generation), max_context, dtype, attention, trust)


def base_folder(path: str | Path, trust: Trust) -> Path:
    """The model folder itself, or that of an adapter's base model."""
    folder = trust.folder(path)
    while (base := base_of_adapter(folder)) is not None:
        folder = trust.folder(base)
    return folder


def stop_token_ids(generation: GenerationConfig) -> tuple[int, ...]:
    """The tokens that end a response according to a generation config."""
    eos = generation.eos_token_id
    return (eos,) if isinstance(eos, int) else tuple(eos or ())


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Writes a Hugging Face folder. It appears whole or not at all, and replaces an older one of the same
    name. Raises ConfigError if the folder holds something else (`require_replaceable`), OSError with an errno
    if it can't be written."""
    require_replaceable(folder, "the model's folder")
    with writing(folder), written_whole(folder) as partial:
        write_weights(model, partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial, save_jinja_files=False)


def write_weights(
    model: PreTrainedModel, folder: Path, parameters: Mapping[str, Tensor] | None = None
) -> None:
    """Writes config and safetensors into an existing folder: tied weights once, views of fused storage as
    separate tensors. `parameters`, if given, are written instead of the model's own. Raises OSError if they
    can't be written."""
    tensors: dict[str, Tensor] = dict(model.named_parameters() if parameters is None else parameters)
    persistent = model.state_dict().keys()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    copies = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    # transformers writes only in the first process of torch's default group, which may be another role's.
    model.should_save_on_this_rank = bool
    with quiet(), writing(folder):
        try:
            model.save_pretrained(folder, state_dict=copies)
        except SafetensorError as error:
            raise OSError(f"{folder}: {first_line(error)}") from error
        finally:
            del model.should_save_on_this_rank


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers shows no bars of its own and logs errors only."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if was_enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yields a new, empty folder to write into, and afterwards renames it to `folder`, replacing an old one.
    If writing fails, `folder` stays as it was and nothing else is left behind. The data reach the disk before
    the folder gets its name: otherwise a power cut could leave empty files under this name."""
    # What has these names already is removed, so they are names that nobody else gives a folder.
    partial, old = (
        folder.with_name(folder.name + ending) for ending in (".turnwise.partial", ".turnwise.old")
    )
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in [*partial.rglob("*"), partial]:
            _flush(path)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        partial.rename(folder)
        _flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not folder.exists():  # a rename failed, now or before a kill
            old.rename(folder)


def remove_folder(folder: Path) -> None:
    """Removes a folder in one step: under its own name it is whole or gone."""
    removed = folder.with_name(folder.name + ".turnwise.removed")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    shutil.rmtree(removed)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolved_attention(name: str) -> str | None:
    if name not in _ATTENTION:
        allowed = ", ".join(_ATTENTION)
        raise ModelError(
            f"attn_implementation {name!r} is unknown; allowed are {allowed}.{nearest(name, _ATTENTION)}"
        )
    if name == "fa2" and not (torch.cuda.is_available() and is_flash_attn_2_available()):
        raise ModelError(
            "attn_implementation fa2 needs a CUDA device and the flash-attn package; use auto or sdpa here"
        )
    return _ATTENTION[name]


def load_model_config(path: str | Path, trust: Trust = NOTHING) -> PreTrainedConfig:
    """The config of a model folder, or of an adapter's base model. Raises ModelError if transformers can't
    use it."""
    folder = trust.folder(path)
    base = base_of_adapter(folder)
    if base is not None:
        return load_model_config(base, trust)
    check_folder(folder, trust)
    if trust.remote_code and any("auto_map" in read_object(file) for file in folder.glob("*config.json")):
        files = ", ".join(sorted(file.name for file in folder.glob("*.py")))
        logger.warning("%s: its own Python code runs here (trust_remote_code: true): %s", path, files)
    with told_as_one_sentence(path, "config.json can't be used"), quiet():
        quantization = text_sizes(read_object(folder / "config.json")).get("quantization_config")
        if quantization and not AutoHfQuantizer.supports_quant_method(quantization):
            raise ModelError(
                f"{folder / 'config.json'}: quantization_config names the method "
                f"{quantization.get('quant_method')!r}, which transformers doesn't know: the weights would "
                "be read as if they were plain; use a model that isn't quantised"
            )
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust.remote_code)


@contextmanager
def told_as_one_sentence(path: str | Path, failure: str) -> Iterator[None]:
    """Turns every error of the libraries that read a folder into a ModelError whose text is `path`, `failure`
    and the reason."""
    try:
        yield
    except (
        BaseException
    ) as error:  # boundary: three libraries read a stranger's files, and one of them panics in Rust
        is_theirs = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, TurnwiseError) or not is_theirs:
            raise
        reason = first_line(error) or type(error).__name__
        if "trust_remote_code" in str(error):
            reason = (
                "it needs Python code of its own folder, which isn't run; read the code, then set "
                "model_args.trust_remote_code: true if you want it to run here"
            )
        elif isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
            reason = (
                "its weights aren't plain tensors: their pickle asks for other objects or code, which "
                "is never run"
            )
        raise ModelError(f"{path}: {failure}: {reason}") from error


def trusted_already(loaded: PreTrainedModel | PreTrainedConfig | PreTrainedTokenizerBase) -> Trust:
    """Trust in a folder's own Python code if the object's class comes from such code, which has then run
    already."""
    return Trust(remote_code=type(loaded).__module__.startswith(_REMOTE_MODULES))


def _shape(sizes: Sequence[int]) -> str:
    return " × ".join(str(size) for size in sizes)
