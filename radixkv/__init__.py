"""radixkv: any Hugging Face decoder over one paged KV cache that a radix tree organises."""
