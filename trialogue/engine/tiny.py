# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false
"""Models of a few million weights, made from nothing: a tokenizer trained on the spot and an LFM2 network.

LFM2 alternates short convolutions with attention; the convolution shows each token the one before it, which
is what copying names and numbers needs, so a small one learns it in a minute instead of ten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

WORD = r" ?[\p{L}_]+[:=*]?| ?\d{1,2}| ?[^\s\p{L}\d]+|\s+"
"""Words with the space before them, a key with its mark, digits in pairs, runs of punctuation."""
RARE = 0.05
"""A word in fewer conversations than this is a name or a number: it counts once, whoever it belongs to."""


def train_tokenizer(
    documents: Sequence[str], controls: Sequence[str], *, size: int = 1024, together: int = 4
) -> Any:
    """A byte-level BPE tokenizer in which common words are one token and names a few regular pieces.

    Rare words count once each, so a piece is merged only when `together` of them share it: the syllables of
    names become tokens, whole names do not, and a name never seen falls into the same pieces.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    split = pre_tokenizers.Split(Regex(WORD), "isolated")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    seen: Counter[str] = Counter()
    for document in documents:
        seen.update({word for word, _ in split.pre_tokenize_str(document)})

    def words() -> Iterator[str]:
        for word, count in sorted(seen.items()):
            yield from [word] * (count if count > RARE * len(documents) else 1)

    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=together,
        special_tokens=list(controls),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(words(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=controls[0],
        eos_token=controls[1],
        clean_up_tokenization_spaces=False,
    )


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
