"""``radixkv bench``: measurements of servers, each a subcommand.

app          the subcommands and their options
datasets     what is asked: turns of conversations
client       one request over HTTP: when it was sent, what came and when
driver       which request is sent when
report       percentiles, rates, the table
"""
