"""Planted bugs: known faults of prefix caches, each as one small change to our source."""

from __future__ import annotations

from typing import NamedTuple

MACHINE = "the state machine"


class Planted(NamedTuple):
    """In ``file``, ``old`` becomes ``new``; ``killer`` is who must notice.

    The killer is the state machine, or, for what it cannot see, a test of ``tests/cache``.
    """

    name: str
    file: str
    old: str
    new: str
    killer: str = MACHINE


JOINED = """self.roots = type("Joined", (dict,), {
            "get": lambda s, key: dict.get(s, "".join(key)),
            "__setitem__": lambda s, key, value: dict.__setitem__(s, "".join(key), value),
            "__delitem__": lambda s, key: dict.__delitem__(s, "".join(key)),
        })()"""

PLANTED = [
    # -- references ------------------------------------------------------------------------------
    Planted(
        "a double free is not noticed",
        "pool.py",
        "if count < 0:",
        "if count < -9:",
        "test_pool.py::test_a_double_free_raises_and_changes_nothing",
    ),
    Planted(
        "a fork does not retain its blocks",
        "manager.py",
        "        self.pool.retain(sequence.table[done:shared])\n",
        "",
    ),
    Planted(
        "a fork does not pin its path",
        "manager.py",
        "            self.tree.pin(sequence.node)\n",
        "            pass\n",
    ),
    Planted(
        "a pin stays for ever",
        "manager.py",
        "            self.tree.unpin(sequence.node)\n        if last",
        "            pass\n        if last",
    ),
    Planted(
        "a failed acquire keeps its pin",
        "manager.py",
        "                self.tree.unpin(node)\n            raise",
        "                pass\n            raise",
    ),
    Planted(
        "the path is pinned, its last node is not",
        "tree.py",
        "            self.pin(node)\n        return node",
        "            self.pin(node.parent)\n        return node",
    ),
    Planted(
        "a split loses the pins of those below",
        "tree.py",
        "upper.pins = 1 if node.pins else 0",
        "upper.pins = 0",
    ),
    Planted(
        "a split forgets that the lower half begins later",
        "tree.py",
        "        node.start += count\n",
        "",
    ),
    Planted(
        "an adopted open block is not retained",
        "visibility.py",
        "            self._tree.retain_open(kept)\n",
        "",
    ),
    Planted(
        "an adopted open block still counts as evictable",
        "tree.py",
        "        if self.pool.refs[block] == 2:\n            self.num_evictable -= 1\n",
        "        if self.pool.refs[block] == 2:\n",
        "test_cache.py::test_an_open_end_that_nobody_holds_is_adopted",
    ),
    Planted(
        "withdrawn blocks are freed under those who hold them",
        "visibility.py",
        "                    self._pool.refs[block] += 1\n",
        "                    pass\n",
    ),
    Planted(
        "an edge grows where another sequence ends",
        "tree.py",
        "grows = node.pins == 1 and",
        "grows = node.pins >= 1 and",
    ),
    # -- eviction --------------------------------------------------------------------------------
    Planted(
        "blocks are allocated before what was matched is held",
        "manager.py",
        "        node = self.tree.hold(match, retention)\n        try:\n"
        "            table += self.allocator.allocate(missing)\n",
        "        own = self.allocator.allocate(missing)\n"
        "        node = self.tree.hold(match, retention)\n        try:\n            table += own\n",
        "test_cache.py::test_what_was_matched_is_not_evicted_for_the_rest",
    ),
    Planted(
        "a whole edge is evicted for one block",
        "tree.py",
        "take = min(count, self.num_unheld(node))",
        "take = self.num_unheld(node)",
        "test_cache.py::test_eviction_takes_from_the_tail",
    ),
    Planted(
        "a use does not save a leaf that is queued already",
        "eviction.py",
        "elif entry is moved or entry[0] == self._current_key(node):",
        "elif True:",
        "test_eviction.py::test_a_use_in_the_meantime_is_noticed",
    ),
    Planted(
        "ephemeral blocks wait like all others",
        "policies.py",
        "return (not node.retention.ephemeral, node.last_used)",
        "return (node.last_used,)",
        "test_eviction.py::test_who_goes_first",
    ),
    Planted(
        "a priority never runs out",
        "eviction.py",
        "        if self._expiring:\n            self._demote_expired()\n",
        "",
        "test_eviction.py::test_a_priority_runs_out",
    ),
    Planted(
        "hints that ran out pile up",
        "eviction.py",
        "            self._expiring.remove(expiry)\n",
        "            pass\n",
        "test_eviction.py::test_the_record_of_hints_does_not_grow_and_keeps_nobody_alive",
    ),
    Planted(
        "the unmatched open end is refreshed with the rest",
        "tree.py",
        "            self._detach_open(node)\n        if used",
        "            pass\n        if used",
        "test_cache.py::test_an_open_end_used_in_part_is_not_refreshed",
    ),
    Planted(
        "what others have used is forgotten with a branch",
        "tree.py",
        "first = max(start - node.start, node.num_used)",
        "first = max(start - node.start, 0)",
        "test_eviction.py::test_only_what_was_not_used_is_forgotten_of_an_edge",
    ),
    Planted(
        "a refused request counts as a use",
        "manager.py",
        "        self.allocator.require(missing + spare_blocks, match)\n",
        "",
        "test_peer_faults.py::test_15_a_retry_is_not_counted",
    ),
    # -- copying ---------------------------------------------------------------------------------
    Planted(
        "no copy on write", "sequence.py", "        return count > 1\n", "        return False\n"
    ),
    Planted(
        "no copy on write into the tree's own block",
        "sequence.py",
        "        if index < self.num_tree_blocks:\n            return True\n",
        "        if index < self.num_tree_blocks:\n            return False\n",
        "test_sequence.py::test_writing_into_a_full_block_of_the_tree_copies_it_first",
    ),
    Planted(
        "the order to copy on write is lost",
        "sequence.py",
        "        allocator.order_copy(self.table[index], target, num_tokens)\n",
        "",
    ),
    Planted(
        "the order to copy at admission is lost",
        "manager.py",
        "self.allocator.order_copy(match.source_block, target, match.source_tokens)",
        "pass",
    ),
    Planted(
        "copies are made backwards",
        "copies.py",
        "waves[-1][order.target] = order.source",
        "waves[-1][order.source] = order.target",
    ),
    Planted(
        "a late copy undoes what its holder wrote anew",
        "sequence.py",
        "if offset and allocator.late:",
        "if False:",
        "test_pending.py::test_a_late_copy_ends_where_its_holder_writes_anew",
    ),
    Planted(
        "a chain of copies is made at once",
        "copies.py",
        "if not waves or order.source in waves[-1]:",
        "if not waves:",
        "test_copies.py::test_waves",
    ),
    Planted(
        "a fork does not copy its half-computed block",
        "manager.py",
        "        if own and computed % self.block_size:",
        "        if False:",
    ),
    Planted(
        "a block that the step computes is copied before",
        "allocator.py",
        "late = source in self.pending",
        "late = False",
    ),
    Planted(
        "a late copy overwrites what the step wrote",
        "allocator.py",
        "CopyOrder(source, target, late, num_tokens)",
        "CopyOrder(source, target, late, self.tree.block_size)",
        "test_pending.py::test_tokens_inside_a_promised_block_are_copied_late_and_alone",
    ),
    Planted(
        "a late copy is made of a copy that may be given up",
        "allocator.py",
        "            source = first.source\n",
        "            pass\n",
        "test_pending.py::test_a_copy_of_a_late_copy_goes_back_to_the_first_source",
    ),
    Planted(
        "a late copy goes into a block that another has by now",
        "allocator.py",
        "            self.drop_late(block for block in blocks if not refs[block])\n",
        "            pass\n",
        "test_pending.py::test_a_copy_of_a_late_copy_goes_back_to_the_first_source",
    ),
    Planted(
        "a late copy is forgotten though another still holds its block",
        "allocator.py",
        "self.drop_late(block for block in blocks if not refs[block])",
        "self.drop_late(blocks)",
        "test_pending.py::test_a_late_copy_stays_while_a_fork_holds_its_block",
    ),
    # -- matching --------------------------------------------------------------------------------
    Planted(
        "namespaces are concatenated",
        "tree.py",
        "self.roots: dict[Namespace, RootNode] = {}",
        JOINED,
    ),
    Planted(
        "namespaces are concatenated in names",
        "hashing.py",
        '        digest.update(len(encoded).to_bytes(8, "little"))\n',
        "",
        "test_hashing.py::test_namespaces_are_never_concatenated",
    ),
    Planted(
        "a block's name forgets what came before",
        "hashing.py",
        "seed=parent)",
        "seed=0)",
        "test_hashing.py::test_a_chained_hash_names_everything_before_it",
    ),
    Planted(
        "tokens are not compared along an edge",
        "match.py",
        "if data.startswith(run, offset):",
        "if len(data) >= offset + len(run):",
    ),
    Planted(
        "tokens are not compared after a hash was found",
        "children.py",
        "        if node is None or node.tokens.startswith(first_block):\n",
        "        if node is not None or not self._collided:\n",
        "test_children.py::test_a_colliding_hash_never_finds_other_tokens",
    ),
    Planted(
        "who collided is lost with who was there first",
        "children.py",
        "                self._by_hash[key] = other\n",
        "",
    ),
    Planted(
        "a neighbour to the left is overlooked",
        "children.py",
        "candidates[max(place - 1, 0) : place + 1]",
        "candidates[place : place + 1]",
        "test_children.py::test_many_children_are_kept_in_order",
    ),
    Planted(
        "an open end that grows is not superseded",
        "tree.py",
        "        self._make_room(node, tokens)\n        self.pool.enter_tree(blocks)\n",
        "        self.pool.enter_tree(blocks)\n",
    ),
    Planted(
        "an empty namespace is kept",
        "tree.py",
        "                del self.roots[parent.namespace]\n",
        "                pass\n",
    ),
    # -- tables ----------------------------------------------------------------------------------
    Planted(
        "the second of two twins is not re-pointed",
        "visibility.py",
        "        sequence.table[done : done + len(theirs)] = theirs\n",
        "",
    ),
    Planted(
        "the second of two twins keeps its copy too",
        "visibility.py",
        "        self._allocator.release(mine)\n",
        "",
    ),
    Planted(
        "truncating gives nothing back",
        "sequence.py",
        "        self._cache.allocator.release(private)\n",
        "",
    ),
    Planted(
        "truncated tokens stay computed",
        "sequence.py",
        "        self.num_computed = min(self.num_computed, num_tokens)\n",
        "",
    ),
    Planted(
        "tokens that did not fit stay",
        "sequence.py",
        "        allocator, size = self._cache.allocator, self._cache.block_size\n",
        "        allocator, size = self._cache.allocator, self._cache.block_size\n"
        "        self.data += data\n        del self.data[len(self.data) - len(data) :]\n"
        "        self.data, kept = self.data + data, self.data\n"
        "        allocator.allocate(0)\n        allocator.require(len(data) // 4)\n"
        "        self.data = kept\n",
    ),
    # -- visibility ------------------------------------------------------------------------------
    Planted(
        "a failed step is not withdrawn",
        "visibility.py",
        "            self.withdraw(sequence, sequence.num_settled)\n",
        "            pass\n",
    ),
    Planted(
        "a promise is not withdrawn with its sequence",
        "visibility.py",
        "            self.withdraw(sequence, sequence.promised_from)\n",
        "            pass\n",
    ),
    Planted(
        "those who share withdrawn blocks do not learn of it",
        "visibility.py",
        "                        work.append((other, safe))\n",
        "                        pass\n",
    ),
    Planted(
        "a sequence does not know that it rests on a promise",
        "visibility.py",
        "            self.expect(sequence, first * self._tree.block_size)\n",
        "            pass\n",
    ),
    Planted(
        "a twin gives up blocks that the step writes",
        "visibility.py",
        "            if self._is_pending(sequence, match):\n                return False\n",
        "",
    ),
    Planted(
        "after a reset old blocks are seen again",
        "manager.py",
        "            self.visibility.hide(sequence)\n",
        "            pass\n",
        "test_cache.py::test_a_reset_reaches_what_was_not_shown_yet",
    ),
    # -- counting --------------------------------------------------------------------------------
    Planted("a preempted request is counted again", "manager.py", "if not resumed:", "if True:"),
    Planted(
        "output tokens are counted as hits",
        "manager.py",
        "hits = min(before + gained, sequence.num_counted) - before",
        "hits = gained",
        "test_cache.py::test_found_output_tokens_are_no_hits",
    ),
    Planted(
        "every chunk is a hit",
        "manager.py",
        "        self.counters.hit_tokens += max(hits, 0)\n",
        "        self.counters.hit_tokens += sequence.num_computed\n",
        "test_cache.py::test_reuse_takes_over_what_others_computed",
    ),
]
