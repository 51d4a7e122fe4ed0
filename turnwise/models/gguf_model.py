"""Makes a plain Hugging Face folder of a GGUF file. Only this module imports gguf."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    __version__ as transformers_version,
)
from transformers.utils import is_accelerate_available

from turnwise.errors import ModelError, NotAvailableError, install_hint
from turnwise.model_files.gguf_file import check_gguf
from turnwise.model_files.sizes import require_rows
from turnwise.models.file_tensors import require_weights
from turnwise.models.load import quiet, save_model, told_as_one_sentence

_DAMAGED = "is cut off or damaged, so fetch it again; reading it as GGUF gave"
_TOKENS = "tokenizer.ggml.tokens"
_END_OF_TURN = "tokenizer.ggml.eot_token_id"
_ARCHITECTURE = "general.architecture"
_OUTPUT = "output.weight"
_LAYERS = "blk."
_ANSWER = "The answer."
Report = Callable[[str], None]
"""Is called with one line for each stage of the work."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of its model."""

    architecture: str
    """GGUF's name, such as `llama`."""
    sizes: Mapping[str, int]
    """How many numbers each tensor has."""
    has_tokenizer: bool
    end_of_turn_id: int | None
    """The token that ends a turn, if the file tells it from the one that ends a text."""


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """The result of `convert_gguf`."""

    folder: Path
    architecture: str
    """GGUF's name, such as `llama`."""
    num_parameters: int
    num_tokens: int
    """Number of tokens of the tokenizer."""
    end_tokens: tuple[str, ...]
    """The tokens that end a response."""


def convert_gguf(
    file: Path,
    out: Path,
    dtype: torch.dtype = torch.float32,
    template_file: Path | None = None,
    report: Report = lambda line: None,
) -> ConvertedModel:
    """Writes the model of a GGUF file to `out`, with its weights as `dtype`: safetensors, tokenizer, chat
    template, and a generation config with the tokens that end a response. `template_file` holds a chat
    template that replaces the file's. Raises ModelError if the file or the template can't be used, or
    transformers doesn't read all of the file's architecture; NotAvailableError if gguf or accelerate isn't
    installed."""
    header = read_header(file)
    report(f"{file}: {header.architecture}, {len(header.sizes)} tensors; reading its tokenizer")
    config = _config(file, header)
    if config.is_encoder_decoder:
        raise ModelError(
            f"{file}: its architecture {header.architecture} has an encoder, and only causal language models "
            "are trained here; name the GGUF file of one"
        )
    tokenizer = _tokenizer(file, header, template_file)
    longest = config.to_dict().get("max_position_embeddings")
    if longest is not None:
        tokenizer.model_max_length = longest
    end_ids = _end_token_ids(tokenizer, header)
    if not end_ids:
        raise ModelError(
            f"{file} names no token that ends a response; name a chat template that ends one with a special "
            "token, with --chat-template FILE"
        )
    require_rows(file, config.get_text_config().vocab_size, max(tokenizer.get_vocab().values()) + 1)
    report(f"converting {sum(header.sizes.values()):,} numbers to {str(dtype).removeprefix('torch.')}")
    model = _model(file, header, config, dtype)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id
    )
    report(f"writing {out}")
    save_model(model, tokenizer, out)
    end_tokens = tuple(tokenizer.convert_ids_to_tokens(end_ids))
    return ConvertedModel(
        out,
        header.architecture,
        model.num_parameters(),
        len(tokenizer),
        end_tokens,
    )


def read_header(file: Path) -> GgufHeader:
    """The header of a GGUF file. Raises ModelError if there is no such file, or it isn't a whole GGUF file;
    NotAvailableError if gguf or accelerate isn't installed."""
    check_gguf(file)
    gguf = _import_gguf()
    with told_as_one_sentence(file, _DAMAGED):
        reader = gguf.GGUFReader(file)
        architecture = reader.fields[_ARCHITECTURE].contents()
        end_of_turn = reader.fields.get(_END_OF_TURN)
        return GgufHeader(
            architecture=architecture,
            sizes={tensor.name: int(tensor.n_elements) for tensor in reader.tensors},
            has_tokenizer=_TOKENS in reader.fields,
            end_of_turn_id=None if end_of_turn is None else int(end_of_turn.contents()),
        )


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise NotAvailableError(
            f"reading a GGUF file needs gguf, which isn't installed; {install_hint('gguf')}"
        ) from error
    if not is_accelerate_available():
        raise NotAvailableError(
            f"transformers reads a GGUF file with accelerate, which isn't installed; {install_hint('gguf')}"
        )
    module: ModuleType = gguf
    return module


def _unreadable(header: GgufHeader) -> str:
    return f"transformers {transformers_version} can't read its architecture {header.architecture}"


def _config(file: Path, header: GgufHeader) -> PreTrainedConfig:
    with told_as_one_sentence(file, _unreadable(header)), quiet():
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)


def _tokenizer(file: Path, header: GgufHeader, template_file: Path | None) -> PreTrainedTokenizerBase:
    if not header.has_tokenizer:
        raise ModelError(f"{file} holds no tokenizer ({_TOKENS}); name a GGUF file with one")
    template = None if template_file is None else _read_template(template_file)
    with told_as_one_sentence(file, "has no usable tokenizer"), quiet():
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.chat_template is None:
        raise ModelError(f"{file} holds no chat template; name one with --chat-template FILE")
    with told_as_one_sentence(template_file or file, "its chat template can't be used"):
        _rendered(tokenizer)
    return tokenizer


def _read_template(file: Path) -> str:
    try:
        template = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} isn't UTF-8 text (byte {error.start}); name a chat template") from error
    except OSError as error:
        raise ModelError(f"{file} can't be read ({error.strerror}); name a chat template") from error
    if not template.strip():
        raise ModelError(f"{file} is empty; name a chat template")
    return template


def _rendered(tokenizer: PreTrainedTokenizerBase) -> str:
    messages = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _ANSWER}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    return text


def _end_token_ids(tokenizer: PreTrainedTokenizerBase, header: GgufHeader) -> list[int]:
    """The tokens that end a response: the file's end of a text and of a turn, and the special token that the
    chat template writes after an answer. A model whose file names the wrong one would never stop."""
    candidates = [tokenizer.eos_token_id, header.end_of_turn_id, _token_after_answer(tokenizer)]
    return list(dict.fromkeys(number for number in candidates if number is not None))


def _token_after_answer(tokenizer: PreTrainedTokenizerBase) -> int | None:
    ending = _rendered(tokenizer).rpartition(_ANSWER)[2].strip()
    ids = tokenizer.encode(ending, add_special_tokens=False)
    if not ids:
        return None
    token = tokenizer.added_tokens_decoder.get(ids[0])
    if token is None or not token.special:
        return None
    return ids[0]


def _model(
    file: Path,
    header: GgufHeader,
    config: PreTrainedConfig,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """The file's model, as one that transformers agrees to save: that it refuses for a model read from GGUF,
    so the tensors go to a model of the same config."""
    with told_as_one_sentence(file, _unreadable(header)), quiet():
        loaded, loading = AutoModelForCausalLM.from_pretrained(
            file.parent,
            config=config,
            gguf_file=file.name,
            dtype=dtype,
            output_loading_info=True,
            local_files_only=True,
        )
        plain_config = type(config).from_dict(_without_origin(loaded.config))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(plain_config, dtype=dtype)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
    require_weights(file, sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"]))
    _require_all_read(file, header, model)
    return model


def _require_all_read(file: Path, header: GgufHeader, model: PreTrainedModel) -> None:
    """Raises ModelError if the model has fewer numbers than the file: transformers passes over tensors that
    it has no place for, without a word."""
    sizes = dict(header.sizes)
    if model.config.get_text_config().tie_word_embeddings:
        sizes.pop(_OUTPUT, None)  # a copy of the embedding
    num_numbers = sum(sizes.values())
    num_parameters = model.num_parameters()
    if num_parameters < num_numbers:
        outside = [name for name in sizes if not name.startswith(_LAYERS)]
        raise ModelError(
            f"{file}: transformers {transformers_version} reads {num_parameters:,} of the {num_numbers:,} "
            f"numbers of this {header.architecture} model, so the folder would hold another model (tensors "
            f"outside of its layers: {', '.join(outside)}); use another GGUF file, or the model's own "
            "safetensors"
        )


def _without_origin(config: PreTrainedConfig) -> dict[str, object]:
    """The config's values, without those that say that it came from a GGUF file."""
    values = config.to_dict()
    return {
        name: value
        for name, value in values.items()
        if name not in ("quantization_config", "_model_name_or_path")
    }
