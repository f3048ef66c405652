"""Additive attention: two recurrent networks learn to reverse words; the alignment is a mirror image."""

import torch

from python_ref.bahdanau import Seq2Seq

LETTERS, LENGTH, BEGIN = "abcdefgh", 5, 8

torch.manual_seed(0)
model = Seq2Seq(len(LETTERS) + 1, width=48)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(1, 251):
    words = torch.randint(len(LETTERS), (32, LENGTH))
    backwards = words.flip(1)
    written = torch.cat((torch.full((32, 1), BEGIN), backwards[:, :-1]), 1)
    loss = torch.nn.functional.cross_entropy(model(words, written).flatten(0, 1), backwards.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

words = torch.randint(len(LETTERS), (200, LENGTH))
written = model.generate(words, BEGIN, LENGTH)
exact = (written == words.flip(1)).all(1).float().mean().item()
for word, answer in zip(words[:3].tolist(), written[:3].tolist(), strict=True):
    print("".join(LETTERS[n] for n in word), "->", "".join(LETTERS[n] for n in answer))
print(f"{exact:.1%} of 200 new words are reversed correctly")
assert exact >= 0.95
