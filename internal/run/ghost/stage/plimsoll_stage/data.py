"""Data that are not here: data sets and tokenizers that are made up, if the user says so.

A data set has rows of texts of so many words, and a tokenizer has as many tokens as the model's configuration says: each
word is one. Else the program's own error is shown, and the record says what was missing.
"""

import functools
import os
from typing import Any, Callable, Dict, List

# Columns that programs look for by name. The last ones are tokens: a data set of the disk has been prepared.
_WHOLE = ("text", "content")
_FIRST = ("prompt", "instruction", "question", "query")
_SECOND = ("completion", "output", "answer", "response", "chosen", "rejected")
_PAIRS = ("sentence", "sentence1", "sentence2", "premise", "hypothesis")
_TURNS = {"messages": ("role", "content", "user", "assistant"), "conversations": ("from", "value", "human", "gpt")}
_TOKENS = ("input_ids", "attention_mask", "labels")
_WORD = "the "  # a token in about every vocabulary
_FEWEST, _MOST, _MOST_WORDS = 64, 512, 1 << 20  # rows, and words of all
_SPLITS = ("train", "validation", "test")
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
          "sentencepiece.bpe.model", "tekken.json", "tiktoken.model", "qwen.tiktoken")  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] + ' ' + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{{ ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def install_datasets(datasets: Any, settings: Dict[str, Any], recorder: Any) -> None:
    """Stands in for data sets that are neither on this host nor in its caches."""
    wanted = settings.get("data")

    def standing_in(really: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(really)
        def load(path, *arguments, **options):
            try:
                return really(path, *arguments, **options)
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) and "find cache" not in str(error):
                    raise
                what = f"the data set {options.get('data_files') or path}"
                if wanted is None:
                    recorder.missing(what)
                    raise
                recorder.note("data", f"{what} is not here: rows of {wanted['tokens']:,} words were made up")
                return make(path, arguments, options)

        return load

    def loaded(path, arguments, options):
        rows = _rows(wanted, max(1, settings["ranks"]))
        split, is_streamed = options.get("split"), options.get("streaming")
        if split is None:
            made = {name: _dataset(datasets, rows) for name in _SPLITS}
            if is_streamed:
                return datasets.IterableDatasetDict({name: x.to_iterable_dataset() for name, x in made.items()})
            return datasets.DatasetDict(made)
        one = [_dataset(datasets, rows) for _ in (split if isinstance(split, list) else [split])]
        one = [x.to_iterable_dataset() for x in one] if is_streamed else one
        return one if isinstance(split, list) else one[0]

    class Either(datasets.DatasetDict):
        """What a folder had: a data set, or one for each split."""

        def __getitem__(self, key):
            return super().__getitem__(key) if key in _SPLITS else self["train"][key]

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(self["train"], name)

    def found(path, arguments, options):
        rows = _rows({**wanted, "columns": wanted["columns"] or list(_TOKENS)}, max(1, settings["ranks"]))
        return Either({name: _dataset(datasets, rows) for name in _SPLITS})

    for name, make in (("load_dataset", loaded), ("load_from_disk", found)):
        function = standing_in(getattr(datasets, name), make)
        setattr(datasets, name, function)
        setattr(datasets.load, name, function)
    if wanted is not None:
        _answer_rows(wanted)


def _rows(wanted: Dict[str, Any], ranks: int) -> Dict[str, List[Any]]:
    """Columns by name: those that were asked for, or the usual ones of text. Trainers take one of labels for their own."""
    count = max(_FEWEST, 8 * ranks, min(_MOST, _MOST_WORDS // wanted["tokens"]))
    names = wanted["columns"] or [*_WHOLE, *_FIRST, *_SECOND, *_PAIRS, "input"]
    return {name: [_value(name, wanted["tokens"])] * count for name in names}


def _value(name: str, words: int) -> Any:
    first = words // 2
    if name in _TURNS:
        who, what, asks, answers = _TURNS[name]
        return [{who: asks, what: _words(first)}, {who: answers, what: _words(words - first)}]
    if name in _TOKENS:
        return [1] * words
    if name == "label":
        return 0
    if name == "input":  # beside an instruction
        return ""
    half = name in _FIRST or name in _PAIRS
    return _words(first if half else words - first if name in _SECOND else words)


def _words(count: int) -> str:
    return (_WORD * max(1, count)).rstrip()


def _dataset(datasets: Any, rows: Dict[str, List[Any]]) -> Any:
    made = datasets.Dataset.from_dict(rows)
    if rows.get("label", [None])[0] == 0:  # programs ask how many there are
        made = made.cast_column("label", datasets.ClassLabel(names=["no", "yes"]))
    return made


def _answer_rows(wanted: Dict[str, Any]) -> None:
    """A row answers for a column that the data set lacks, too, when the program names it."""
    from datasets.formatting import formatting

    rows = formatting.LazyDict
    really = rows.__getitem__

    def get(self, key):
        if key in self.data or not isinstance(key, str):
            return really(self, key)
        value = _value(key, wanted["tokens"])
        return [value] * len(self.pa_table) if isinstance(self, formatting.LazyBatch) else value

    rows.__getitem__ = get
    rows.get = lambda self, key, default=None: self[key] if key in self.data else default


def install_tokenizers(module: Any, settings: Dict[str, Any], recorder: Any) -> None:
    """Stands in for tokenizers without files, in a class that has from_pretrained."""
    wanted = settings.get("data")
    for name in ("AutoTokenizer", "PreTrainedTokenizerBase"):
        kind = getattr(module, name, None)
        if kind is not None:
            kind.from_pretrained = classmethod(_from_pretrained(kind.from_pretrained.__func__, wanted, recorder))


def _from_pretrained(really: Callable[..., Any], wanted: Any, recorder: Any) -> Callable[..., Any]:
    @functools.wraps(really)
    def from_pretrained(cls, path, *arguments, **options):
        if _has_files(path, options):
            return really(cls, path, *arguments, **options)
        what = f"the tokenizer of {path}"
        config = _config(path, options) if wanted is not None else None
        if config is None:
            recorder.missing(what)
            return really(cls, path, *arguments, **options)
        made = _tokenizer(config, options)
        made.name_or_path = str(path)
        recorder.note("data", f"{what} is not here: one of {len(made):,} tokens was made up, to which a word is a token")
        return made

    return from_pretrained


def _has_files(path: Any, options: Dict[str, Any]) -> bool:
    within = options.get("subfolder") or ""
    if os.path.isfile(str(path)):
        return True
    if os.path.isdir(str(path)):
        return any(os.path.exists(os.path.join(path, within, name)) for name in _FILES)
    from huggingface_hub import try_to_load_from_cache

    options = {k: options[k] for k in ("cache_dir", "revision") if options.get(k) is not None}
    try:
        return any(isinstance(try_to_load_from_cache(str(path), os.path.join(within, name), **options), str) for name in _FILES)
    except ValueError:  # no name of a model
        return True


def _config(path: Any, options: Dict[str, Any]) -> Any:
    from transformers import AutoConfig

    config = options.get("config")
    if not hasattr(config, "to_dict"):
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=options.get("trust_remote_code", False))
        except (OSError, ValueError):
            return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text if isinstance(getattr(text, "vocab_size", None), int) else None


def _tokenizer(config: Any, options: Dict[str, Any]) -> Any:
    """A tokenizer with a token for each number of the vocabulary, and the special ones where the configuration has them."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    special: Dict[int, str] = {}
    for name in ("eos", "bos", "pad"):
        number = getattr(config, f"{name}_token_id", None)
        number = number[0] if isinstance(number, (list, tuple)) and number else number
        if isinstance(number, int) and 0 <= number < config.vocab_size:
            special.setdefault(number, f"<{name}>")
    free = (i for i in range(config.vocab_size - 1, -1, -1) if i not in special)
    for name in ("eos", "pad", "unk"):
        if f"<{name}>" not in special.values():
            special[next(free)] = f"<{name}>"
    words = iter([_WORD.strip(), *(f"w{i}" for i in range(config.vocab_size))])
    vocabulary = {special.get(i) or next(words): i for i in range(config.vocab_size)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = ("padding_side", "truncation_side", "model_max_length")
    given = {name: options[name] for name in names if options.get(name) is not None}
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int):
        given.setdefault("model_max_length", most)
    tokens = {f"{name}_token": f"<{name}>" for name in ("eos", "bos", "pad", "unk") if f"<{name}>" in special.values()}
    made = PreTrainedTokenizerFast(tokenizer_object=model, **tokens, **given)
    made.chat_template = _TEMPLATE
    return made
