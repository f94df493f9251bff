"""A tagger of tokens for Hugging Face's Trainer, as its users write it; nothing of elastix."""

import tempfile

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

WORDS, LENGTH, TAGS = 11, 7, 3


class Sentences(Dataset):
    """Each has another number of tokens that count."""

    def __init__(self, amount, seed):
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(WORDS, (amount, LENGTH), generator=generator)
        self.tags = (self.words + self.words.roll(1, 1)) % TAGS
        counted = torch.randint(1, LENGTH + 1, (amount, 1), generator=generator)
        self.tags[torch.arange(LENGTH) >= counted] = -100

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.tags[index]}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16))
        self.head = nn.Linear(16, TAGS)

    def forward(self, input_ids, labels, num_items_in_batch=None, **_):
        seen = self.words(input_ids)
        logits = self.head(self.body(torch.cat([seen, seen.roll(1, 1)], dim=-1)))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        items = labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": loss / items, "logits": logits}


def run(config):
    torch.manual_seed(1)
    model = Tagger().double()
    args = TrainingArguments(
        output_dir=config["save"] or tempfile.gettempdir(),
        per_device_train_batch_size=config["batch_size"] // 4,
        gradient_accumulation_steps=4,
        per_device_eval_batch_size=64,
        num_train_epochs=config["epochs"],
        learning_rate=config["lr"],
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch" if config["save"] else "no",
        save_total_limit=2,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        model=model, args=args, train_dataset=Sentences(97, 7), eval_dataset=Sentences(41, 8)
    )
    trainer.train()
    config["losses"] += [
        [round(entry["epoch"]) - 1, entry["eval_loss"]]
        for entry in trainer.state.log_history
        if "eval_loss" in entry
    ]
    if config["save"]:
        trainer.save_model(config["save"] + "/final")
