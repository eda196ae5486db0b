"""The TPU kernels: one fused kernel of DMAs and products for decode, verify and prefill."""
