# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
"""Models of a few million weights, made from nothing: a tokenizer trained on the spot and an LFM2 network.

LFM2 alternates short convolutions with attention; the convolution shows each token the one before it, which
is what copying names and numbers needs, so a small one learns it in a minute instead of ten.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

WORD = r" ?[\p{L}_]+[:=*]?"
"""A word with the space before it; a key with its mark."""
JOINED = "[ _]"
"""What stands before a word that is given: a space, or the line that joins it to another one."""
OTHER = r" ?\p{L}{1,2}| ?\d{1,2}| ?[^\s\p{L}\d]+|\s"
"""What is no common word: letters and digits in pairs, runs of punctuation."""
RARE = 0.025
"""A word in fewer conversations than this is a name or a number, and is written in pairs of letters."""


def train_tokenizer(
    documents: Sequence[str], controls: Sequence[str], *, size: int = 4096, words: Sequence[str] = ()
) -> Any:
    """A byte-level BPE tokenizer in which a common word is one token and anything else pairs of letters.
    With `words`, these are the common ones, also where a line joins them to an identifier.

    So every name falls into the same few pieces, whether it was ever seen or not, and its first piece starts
    with the space before it.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    common = sorted(words or find_common(documents), key=lambda word: (-len(word), word))
    listed = "|".join(map(re.escape, common))
    own = rf"{JOINED}(?:{listed})(?!\p{{L}})" if words else rf" ?(?:{listed})(?![\p{{L}}_])"
    split = pre_tokenizers.Split(Regex(f"{own}|{OTHER}"), "isolated")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(controls),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=controls[0],
        eos_token=controls[1],
        clean_up_tokenization_spaces=False,
    )


def find_common(documents: Sequence[str]) -> list[str]:
    """The words of more than a few documents."""
    from tokenizers import Regex, pre_tokenizers

    by_words = pre_tokenizers.Split(Regex(f"{WORD}|{OTHER}"), "isolated")
    seen: Counter[str] = Counter()
    for document in documents:
        seen.update({word.strip() for word, _ in by_words.pre_tokenize_str(document)})
    return [word for word, count in seen.items() if count > RARE * len(documents) and len(word) > 2]


def make_model(
    vocabulary: int,
    *,
    width: int = 128,
    layers: Sequence[str] = ("conv", "full_attention", "conv", "full_attention"),
    heads: int = 4,
    feed_forward: int = 384,
    positions: int = 4096,
    seed: int = 0,
) -> Any:
    """A small LFM2 network with random weights."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(seed)
    config = Lfm2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=len(layers),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        layer_types=list(layers),
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return Lfm2ForCausalLM(config)
