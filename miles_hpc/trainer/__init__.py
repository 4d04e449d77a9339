"""Our own engine on megatron-core. With `probe` the only package that may import torch, ray, megatron or sglang."""
