"""The parquet files of a synthesis, read by `datasets` and learned from by TRL's SFTTrainer as they are:
`make test-trl`, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
pytest.importorskip("trl", reason="TRL lives in an environment of its own: make test-trl")

import torch
import trl
from datasets import DatasetDict, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

TEMPLATE = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> DatasetDict:
    folder = tmp_path_factory.mktemp("corpus")
    words = ["synthesize", "shop", "--count", "12", "synthesize.validation=0.3", "run.name=corpus"]
    subprocess.run([sys.executable, "-m", "trialogue", *words], cwd=folder, check=True, capture_output=True)
    files = {split: str(folder / f"runs/corpus/{split}.parquet") for split in ("train", "validation")}
    loaded: Any = load_dataset("parquet", data_files=files, cache_dir=str(folder / "cache"))
    return loaded


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, and Qwen3's own template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def test_datasets_reads_it(corpus: DatasetDict) -> None:
    rows = [*corpus["train"], *corpus["validation"]]
    assert len(rows) == 12
    assert {"id", "scenario", "split", "messages", "tools"} <= set(corpus["train"].column_names)
    for row in rows:
        assert [message["role"] for message in row["messages"][:2]] == ["system", "user"]
        assert {tool["type"] for tool in json.loads(row["tools"])} == {"function"}
        calls = [call for message in row["messages"] for call in message["tool_calls"] or ()]
        assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
        answers = [message for message in row["messages"] if message["role"] == "tool"]
        assert [call["id"] for call in calls] == [answer["tool_call_id"] for answer in answers]
    assert any(message["tool_calls"] for message in rows[0]["messages"])


def test_trl_learns_from_it(corpus: DatasetDict, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=32768,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    settings = SFTConfig(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        assistant_only_loss=True,
        max_length=None,
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        seed=0,
    )
    trainer: Any = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=corpus["train"],
        eval_dataset=corpus["validation"],
        processing_class=tokenizer,
    )
    row = next(iter(trainer.train_dataset))
    learned = tokenizer.decode([label for label in row["labels"] if label != -100])
    source = corpus["train"][0]["messages"]
    for message in source:
        if message["role"] == "assistant":
            assert (message["content"] or "") in learned
            for call in message["tool_calls"] or ():
                assert call["function"]["name"] in learned
        elif message["role"] in ("user", "tool"):
            assert message["content"] not in learned
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert trainer.evaluate()["eval_loss"] > 0
