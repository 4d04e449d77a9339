"""A small byte-level tokenizer with a chat template, made on the spot without network, for random models.

The same vocabulary size gives the same files, byte for byte. Knows nothing of models.
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from miles_hpc.errors import DriverError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
_SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
_NUM_BYTES = 256

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "State the final answer to the following arithmetic problem: what is the sum of these numbers?",
    "Answer with just the number. The answer is the result of the calculation.",
    "user assistant system question answer problem number final following arithmetic",
    "Please write the word, the letter, the list or the value that solves this task.",
)


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of exactly `vocab_size` tokens; digits are always single tokens.

    Merges are learnt from a fixed text of a few lines; the rest of the vocabulary is reserved tokens that no text
    encodes to.

    Raises:
        DriverError: if `vocab_size` has no room for every byte and the special tokens.
    """
    smallest = _NUM_BYTES + len(_SPECIAL)
    if vocab_size < smallest:
        raise DriverError(
            f"model.vocab_size: found {vocab_size}; expected at least {_NUM_BYTES} bytes + {len(_SPECIAL)} "
            f"special tokens = {smallest} for a random model. Set vocab_size = 512."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    reserved = range(tokenizer.get_vocab_size(), vocab_size)
    tokenizer.add_tokens([f"<|reserved_{index}|>" for index in reserved])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=TURN_START,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        chat_template=_CHAT_TEMPLATE,
    )


def save_tokenizer(vocab_size: int, folder: Path) -> None:
    """Write the files of `make_tokenizer(vocab_size)` into `folder`."""
    make_tokenizer(vocab_size).save_pretrained(folder)
