"""``radixkv lint``: where prompts that should share begin to differ, and what it costs.

requests     logged requests, as they were read
prompts      their tokens, by the model's own tokenizer and chat template
divergence   where each prompt leaves what came before it, and what is equal behind that
kinds        what a difference is: a timestamp, an id, an order
judge        which differences are worth naming, and what each costs
report       findings, for people and as JSON
run          the command
"""
