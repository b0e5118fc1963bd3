"""The faults, and for each the tests that find it.

A mutant is a piece of a module's text, which is there once, and the piece in its place. Where the piece is no longer
there, give the mutant the line that does the same now; where its tests have moved, the selection that finds it.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """One fault; its name says which promise it breaks."""

    file: str
    """In ``overlap/``."""
    before: str
    after: str
    tests: str
    """The narrowest selection that fails: arguments of pytest, paths in ``tests/``."""


_ZERO, _CODECS = "optim/zero/test_zero_parity.py", "hooks/wires/test_codecs.py"
_FEEDBACK = "hooks/quantize/test_error_feedback.py"
_POWERSGD = "hooks/powersgd/test_algorithm.py"
_AVERAGES = "optim/local_sgd/test_local_sgd_averages.py"

MUTANTS: dict[str, Mutant] = {
    # The engine.
    "the sum is divided by another number": Mutant(
        "hooks/engine/runtime.py",
        "divisor=gradient_divisor(self.context.group),",
        "divisor=gradient_divisor(self.context.group) + 1,",
        "hooks/test_reducers.py -k all_reduce_equals",
    ),
    "a collective is not waited for": Mutant(
        "hooks/engine/executors.py", "work.wait(_POLL_INTERVAL)", "pass", "hooks/engine/test_order.py"
    ),
    "collectives are in another order": Mutant(
        "hooks/engine/wavefront.py",
        "moving = self._moving = [task, *self._moving]",
        "moving = self._moving = [*self._moving, task]",
        "hooks/engine/test_wavefront.py",
    ),
    "a plan that is not invalidated": Mutant(
        "hooks/engine/runtime.py",
        "kept.bucket.divisor == begun.divisor",
        "begun.divisor != 0",
        "hooks/engine/test_plans.py -k divisor",
    ),
    "an exception on one rank is not reported": Mutant(
        "hooks/engine/wavefront.py",
        "self.executor.channels.fail(error)",
        "self.executor.channels.abort()",
        "hooks/engine/test_failure.py -k again_and_again",
    ),
    "a rank that waits does not poll": Mutant(
        "hooks/engine/executors.py", "board.poll()", "pass", "hooks/engine/test_host_executor.py"
    ),
    "hyperparameters are not compared at registration": Mutant(
        "hooks/engine/registration.py",
        "settings = [dict(update.settings) for update in runtime.updates]",
        "settings = [{} for update in runtime.updates]",
        "optim/test_step_registered.py -k other_hyperparameters",
    ),
    "an abandoned backward is not noticed": Mutant(
        "hooks/engine/runtime.py",
        "if_abandoned(partial(self._abandon, self.passes))",
        "if_abandoned(lambda: None)",
        "optim/test_step_abandoned.py",
    ),
    "shards decide by themselves whether a step is made": Mutant(
        "hooks/meshes.py",
        "group_all_reduce(verdict, op=dist.ReduceOp.MAX, group=group)",
        "pass",
        "meshes/test_meshes_reducers.py -k discarded_by_all_shards",
    ),
    "partial sums of a 1-D mesh are lost": Mutant(
        "hooks/meshes.py", "flat.add_(unit.partial)", "pass", "meshes/test_meshes_parity.py -k group"
    ),
    "a name missing in FSDP's unit": Mutant(
        "hooks/meshes.py",
        "names={shard: unit.names[one] for unit in units for",
        "names={shard: unit.names[one] for unit in units[1:] for",
        "meshes/test_meshes_state.py -k every_bit",
    ),
    "the error of another shard is not heard": Mutant(
        "hooks/meshes.py",
        "elif (found := int(verdict)) >= 2:",
        "elif (found := int(verdict)) < 0:",
        "meshes/test_meshes_reducers.py -k 'one_on_all and hsdp'",
    ),
    # Reducers and transforms.
    "a cast is not cast back": Mutant(
        "hooks/reducers.py",
        "bucket.buffer.copy_(compressed.buffer)",
        "pass",
        "hooks/test_torch_names.py -k equals",
    ),
    "the ranks of a machine are not summed first": Mutant(
        "hooks/wires/feedback.py",
        "levels=self._levels if is_own else None",
        "levels=None",
        "hooks/test_bytes_between_machines.py -k bytes_that_the_page_says",
    ),
    "the last rule decides": Mutant(
        "hooks/route.py",
        "(rule for rule in self.rules if _matches",
        "(rule for rule in reversed(self.rules) if _matches",
        "hooks/test_route.py",
    ),
    "the count of one rank": Mutant(
        "hooks/transforms/divide_by_count.py",
        "self._is_launched = True\n        return self._reduction",
        "self._is_launched = True\n        return self._launched",
        "hooks/transforms/test_divide_by_count.py -k one_process",
    ),
    "a count is divided by, and the ranks as well": Mutant(
        "hooks/transforms/divide_by_count.py",
        "bucket.with_changes(divisor=1)",
        "bucket",
        "hooks/transforms/test_divide_by_count.py -k one_process",
    ),
    "a count that is not reset": Mutant(
        "hooks/transforms/divide_by_count.py",
        "self._new = self._accumulated = None\n        self._is_launched",
        "self._accumulated = None\n        self._is_launched",
        "hooks/transforms/test_divide_by_count.py -k one_process",
    ),
    "the count of gradients that the loop has cleared": Mutant(
        "hooks/transforms/divide_by_count.py",
        "if self._accumulated is not None and all(",
        "if self._accumulated is None and all(",
        "hooks/transforms/test_divide_by_count.py -k accumulated",
    ),
    "clipping by the norm of an earlier pass": Mutant(
        "hooks/transforms/clip.py",
        "self._norm = self.clipping.clip_(gradients)",
        "self._norm = self.clipping.scale_(gradients, self._norm) or self._norm if self._norm else "
        "self.clipping.clip_(gradients)",
        "hooks/transforms/test_transforms_parity.py -k norm_can_be_read",
    ),
    "the norm is summed in the optimizer's order": Mutant(
        "hooks/transforms/clip.py",
        "return [one for one in known if one in given] + [one for one in given if one not in known]",
        "return list(given)",
        "optim/test_clipping.py -k models_order",
    ),
    # Wires.
    "errors are dropped": Mutant("hooks/wires/feedback.py", "self._committed[key] = value", "pass", _FEEDBACK),
    "a memory that is not taken back": Mutant(
        "hooks/wires/feedback.py",
        "del self._tentative[key]",
        "pass",
        "hooks/wires/test_memory_and_the_step.py -k three_ranks",
    ),
    "errors are added twice": Mutant(
        "hooks/wires/feedback.py", "add_all(changed, errors)", "[add_all(changed, errors) for _ in range(2)]", _FEEDBACK
    ),
    "each new rank has the errors of one old rank": Mutant(
        "hooks/wires/feedback.py",
        'errors = summed_errors(states, "error", rank=rank, ranks=ranks)',
        'errors = dict(states[rank % len(states)].get("error", {}))',
        "resume/test_other_ranks.py -k inside_of_others",
    ),
    "the generator of rounding is not saved": Mutant(
        "hooks/wires/feedback.py",
        "return self._state if self._generator is None else self._generator.get_state()",
        "return self._state",
        "resume/test_train_state.py",
    ),
    "integers are off by half a step": Mutant(
        "hooks/wires/formats.py",
        "torch.mul(payload, step, out=out)",
        "torch.mul(payload + 0.5, step, out=out)",
        _CODECS,
    ),
    "values are scaled to half of the range": Mutant(
        "hooks/wires/formats.py",
        "self.pack(scaled := values / step",
        "self.pack(scaled := values / (2 * step)",
        _CODECS,
    ),
    "values are rounded down": Mutant(
        "hooks/wires/formats.py", "return values.round_()", "return values.floor_()", _CODECS
    ),
    "one value fewer is sent": Mutant(
        "hooks/wires/formats.py",
        "max(1, round(self.density * chunk_numel))",
        "max(1, round(self.density * chunk_numel) - 1)",
        _CODECS,
    ),
    # PowerSGD.
    "the basis is not orthogonal": Mutant(
        "hooks/powersgd/algorithm.py",
        "basis: Tensor = torch.linalg.qr(rows.mT)[0].mT",
        "basis = rows",
        _POWERSGD,
    ),
    "every step starts from random directions": Mutant(
        "hooks/powersgd/algorithm.py",
        "found = self.memory.get(key, side) if self.cold_step is None else None",
        "found = None",
        "hooks/powersgd/test_torch_parity.py -k outputs",
    ),
    "the residual is not added": Mutant(
        "hooks/powersgd/algorithm.py",
        "add_all([gradient for gradient, _ in pairs], [residual for _, residual in pairs if residual is not None])",
        "pass",
        _POWERSGD,
    ),
    "factors are not averaged": Mutant(
        "hooks/powersgd/algorithm.py",
        "mean.reduction = all_reduce(sent, group=self.bucket.group)",
        "mean.reduction = all_reduce(sent[own.flat.numel() :], group=self.bucket.group)",
        f"{_POWERSGD} -k suffices",
    ),
    "small matrices are compressed": Mutant(
        "hooks/powersgd/algorithm.py",
        "(rows + cols) * rank * min_compression_rate < rows * cols",
        "(rows + cols) * min_compression_rate < rows * cols",
        "hooks/powersgd/test_layout.py",
    ),
    "residuals are not scaled to another number of ranks": Mutant(
        "hooks/powersgd/memory.py",
        "times=ranks / max(1, len(states))",
        "times=1.0",
        "hooks/powersgd/test_checkpoint.py -k another_number_of_ranks",
    ),
    # The update in backward.
    "only one parameter of a bucket is stepped": Mutant(
        "optim/stepper.py",
        "members.setdefault(self._places[id(parameter)], []).append(parameter)",
        "members.setdefault(self._places[id(parameter)], [parameter])",
        "loops/test_loops.py -k 'AdamW and fused'",
    ),
    "the learning rate of an earlier step": Mutant(
        "optim/stepper.py",
        'split.append((place, {"params": own}))',
        'split.append((place, {**group, "params": own}))',
        "optim/test_stepper.py -k rate_of_now",
    ),
    "lists for kernels stay as they are when the state was replaced": Mutant(
        "optim/kernels.py",
        "self._known = known\n            self._runs.clear()",
        "self._known = known",
        "optim/test_kernels.py -k Nesterov",
    ),
    "unused parameters are updated": Mutant(
        "optim/step.py", "if used is not None:", "if used == []:", "loops/test_loops.py -k 'by and turns'"
    ),
    "a deferred update can be made twice": Mutant(
        "optim/lifecycle.py",
        "note_applied([p for p in updated if id(p) in reduced] if updated else ())",
        "note_applied(())",
        "loops/test_loops.py -k 'two and step and for and one'",
    ),
    "skip_update() is ignored": Mutant(
        "optim/update.py",
        "is_skipped = bool(self.optimizer.blocks) and not is_replay",
        "is_skipped = False",
        "optim/test_remedies.py -k message_names",
    ),
    "found_inf is ignored": Mutant(
        "optim/stepper.py",
        "return bool(self.found_inf.item())",
        "return False",
        "optim/test_step_grad_scaler.py",
    ),
    "an applied gradient can be written to": Mutant(
        "_torch/read_only.py",
        "written[0].policy.refuse(written[0], DeniedAccess.ACCUMULATE if in_backward() else DeniedAccess.WRITE)",
        "written[0].policy.refuse(written[0], DeniedAccess.ACCUMULATE) if in_backward() else None",
        "optim/test_applied_gradients.py -k every_write",
    ),
    "a second backward is accepted": Mutant(
        "optim/lifecycle.py",
        "Phase.APPLIED: _SECOND_BACKWARD,",
        "Phase.APPLIED: Phase.BACKWARD,",
        "optim/test_remedies.py -k message_names",
    ),
    "gradients of no_sync() are applied": Mutant(
        "optim/lifecycle.py",
        "local = [p for p in pending if id(p) not in reduced and p in self.names]",
        "local = []",
        "optim/test_step_loop_errors.py -k not_reduced",
    ),
    "released gradients stay in memory": Mutant(
        "optim/release.py", "resize_storage(self._storage, 0)", "pass", "optim/test_release.py -k peak"
    ),
    # ZeRO.
    "a shard is off by a block": Mutant(
        "optim/zero/shards.py",
        "min(numel, rank * each)",
        "min(numel, rank * each + block_numel)",
        "optim/zero/test_zero_partition.py -k share",
    ),
    "the owner of a parameter does not have the least": Mutant(
        "optim/zero/shards.py",
        "heapq.heappop(owned)",
        "owned.pop()",
        "optim/zero/test_zero_partition.py -k balanced",
    ),
    "new parameters are not gathered": Mutant(
        "optim/zero/exchange.py",
        "sends += [(message, peer) for peer in peers]",
        "sends += [(torch.zeros_like(message), peer) for peer in peers]",
        f"{_ZERO} -k 'every_form and 2'",
    ),
    "a shard is read at another offset": Mutant(
        "optim/zero/checkpoint.py",
        "start : last - start] = whole[first - begin : last - begin]",
        "start : last - start] = whole[: last - first]",
        "optim/zero/test_zero_from_optimizer.py -k goes_on_bit_for_bit",
    ),
    # Local SGD.
    "averages are a step late": Mutant(
        "optim/local_sgd/averager.py",
        "if self.step == self.round_end:",
        "if self.step - 1 == self.round_end:",
        _AVERAGES,
    ),
    "fragments are not averaged in turn": Mutant(
        "optim/local_sgd/averager.py",
        "fragment = self.rounds % len(self.fragments)",
        "fragment = 0",
        _AVERAGES,
    ),
    "the warm-up of an averager is left out": Mutant(
        "optim/local_sgd/torch_names.py",
        "if step >= self.warmup_steps and (step",
        "if (step",
        "optim/local_sgd/test_local_sgd_torch_names.py -k two_ranks",
    ),
    "the outer optimizer makes no step": Mutant(
        "optim/local_sgd/averager.py", "step_whole(self.outer)", "copy_all(anchors, means)", _AVERAGES
    ),
    "changes are taken from an earlier average": Mutant(
        "optim/local_sgd/averager.py",
        "copy_all(anchors, means)",
        "anchors = means",
        "optim/local_sgd/test_local_sgd_wires.py",
    ),
    # Join.
    "the sum is divided by all ranks, not by those with inputs": Mutant(
        "join/context.py",
        "return max(1, sum(active[rank] for rank in ranks))",
        "return len(ranks)",
        "join/test_join_parity.py -k chains",
    ),
    "a rank without inputs leaves out a step": Mutant(
        "join/context.py",
        "self._adapters[int(index)].replay(call, detail[: _OF_CALL - 1])",
        "self._adapters[int(index)].replay(call, detail[: _OF_CALL - 1]) if call < Call.STEP else None",
        "join/test_join_parity.py -k other_optimizers",
    ),
    "hyperparameters are not followed": Mutant(
        "join/context.py",
        "self._hyperparameters.follow(detail[_OF_CALL - 1 :])",
        "pass",
        "loops/test_loops.py -k 'momentum and hand'",
    ),
    "purposes are not compared": Mutant(
        "ranks/board.py", "if purpose != self._purpose:", "if not purpose:", "ranks/test_agreement.py -k purposes"
    ),
    # States.
    "the state of stages is not saved": Mutant(
        "resume/state.py",
        '"state": self.stage.state_dict()}',
        '"state": {}}',
        "resume/test_train_state.py -k two_ranks",
    ),
    "the state of another rank is loaded": Mutant(
        "resume/state.py",
        'if (state["rank"], state["ranks"]) != (self.rank, self.ranks):',
        'if state["ranks"] != self.ranks:',
        "resume/test_train_state.py -k two_ranks",
    ),
    "what is another rank's own is read": Mutant(
        "resume/folder.py",
        "return _ALL if self._parts.get(part) else rank",
        "return _ALL if self._parts.get(part) else 0",
        "resume/test_folder.py -k two_ranks",
    ),
    "what a refused load has loaded stays": Mutant(
        "resume/folder.py",
        "undone.callback(target.load_state_dict, copy.deepcopy(target.state_dict()))",
        "pass",
        "resume/test_folder.py -k two_ranks",
    ),
    # Everything else.
    "the slowest of a race stays": Mutant(
        "plan/race.py",
        "fastest = min(raced, key=lambda one: statistics.median(self.ratios[one]))",
        "fastest = max(raced, key=lambda one: statistics.median(self.ratios[one]))",
        "plan/test_race.py -k fastest_has",
    ),
    "a race draws random numbers": Mutant(
        "plan/race.py", "torch.set_rng_state(on_cpu)", "pass", "plan/test_auto.py -k all_kinds"
    ),
    "a timeline counts half of the bytes": Mutant(
        "hooks/collectives.py",
        "sent=lambda size: 2 * tensor.nbytes * (size - 1) / size",
        "sent=lambda size: tensor.nbytes * (size - 1) / size",
        "timeline/test_recording.py",
    ),
    "a removed name gives no hint": Mutant("_lazy.py", "if name not in REMOVED:", "if name:", "test_public_names.py"),
    "a link can be imported": Mutant(
        "_lazy.py", "if module != package:", "if not module:", "test_public_names.py -k links"
    ),
    "an error lacks the remedy": Mutant(
        "hooks/chain.py", "Write chain({remedy}); a function", "A function", "test_wrong_arguments.py"
    ),
}
