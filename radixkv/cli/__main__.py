"""``python -m radixkv.cli``: the console script, where it is not on the path."""

from radixkv.cli.app import main

main()
