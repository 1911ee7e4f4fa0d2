"""A client of bench/preload.py: a mixture of experts as Hugging Face's transformers has it, with random weights.

Prints what gpt_checkpointed.py does. Needs transformers, and peft with --lora.
"""

import argparse
import json
import time

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

on_gpu = torch.cuda.is_available()
parser = argparse.ArgumentParser()
for name, value in (("layers", 16), ("hidden", 2048), ("experts", 64), ("top-k", 8), ("moe-intermediate", 768), ("batch", 8),
                    ("seq", 2048), ("vocab", 32000), ("steps", 10), ("warmup", 3)):
    parser.add_argument(f"--{name}", type=int, default=value)
for name in ("no-checkpoint", "lora", "deterministic"):
    parser.add_argument(f"--{name}", action="store_true")
options = parser.parse_args()
torch.manual_seed(0)
torch.use_deterministic_algorithms(options.deterministic)
config = Qwen3MoeConfig(vocab_size=options.vocab, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
                        moe_intermediate_size=options.moe_intermediate, num_hidden_layers=options.layers,
                        num_attention_heads=16, num_key_value_heads=4, head_dim=128, num_experts=options.experts,
                        num_experts_per_tok=options.top_k, use_cache=False)
with torch.device("cuda" if on_gpu else "cpu"):
    model = Qwen3MoeForCausalLM(config)
if on_gpu:
    model = model.to(torch.bfloat16)
if options.lora:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    model.enable_input_require_grads()
model.train()
if not options.no_checkpoint:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4,
                              **({"fused": True} if on_gpu else {}))
ids = torch.randint(0, options.vocab, (options.batch, options.seq), generator=torch.Generator().manual_seed(1))
ids = ids.to("cuda" if on_gpu else "cpu")


def step():
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


losses = [step() for _ in range(options.warmup)]
if on_gpu:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
began = time.perf_counter()
losses += [step() for _ in range(options.steps)]
if on_gpu:
    torch.cuda.synchronize()
print(json.dumps({"ms_per_step": (time.perf_counter() - began) / options.steps * 1e3,
                  "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
                  "losses": [float(loss).hex() for loss in losses]}))
