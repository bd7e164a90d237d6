package simulate

import (
	"fmt"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/autograd"
)

// This file plans what a checkpoint takes on the host while it is written, and while a job that goes on from it reads
// it. What a rank writes from the memory of the host takes none. A tensor of a GPU is copied first.

// savedParameters returns what save_pretrained writes: with an adapter only what it adds.
func (s *simulation) savedParameters() []*autograd.Parameter {
	if s.Adapter != nil {
		return s.trained
	}
	return s.parameters
}

// bytesStored returns the size of parameters as they are stored.
func bytesStored(parameters []*autograd.Parameter) (sum int64) {
	for _, p := range parameters {
		sum += p.Bytes()
	}
	return sum
}

// fullStatesOf returns the size of the states of parameters, and of the largest one.
func (s *simulation) fullStatesOf(parameters []*autograd.Parameter) (sum, largest int64) {
	for _, p := range parameters {
		for _, state := range s.Optimizer.States(p) {
			sum, largest = sum+state.Bytes, max(largest, state.Bytes)
		}
	}
	return sum, largest
}

// reverts copies the projections of experts that share a parameter, on the device where they are, while body runs:
// transformers 5 writes the experts one by one, as they were published (revert_weight_conversion). It has views of the
// down projections, and copies of the others. Measured with a Qwen3-MoE of 64 experts: 1.09 of their size.
func (s *simulation) reverts(device *trace, share func(int64) int64, body func()) {
	var bytes int64
	if s.OfTransformers() && s.Versions.Transformers.AtLeast(5, 0, 0) && s.Adapter == nil {
		fused := map[string]bool{}
		for _, b := range s.Model.Network.Blocks() {
			if x := b.FeedForward.Mixture; x != nil && x.Fused() {
				fused[x.GateUp] = true
			}
		}
		for _, p := range s.parameters {
			if fused[p.Name] {
				bytes += p.Bytes()
			}
		}
	}
	device.during(share(bytes), ledger.RevertedExperts, whyReverts, body)
}

func whyReverts() string {
	return "gate and up projections of experts, which the first rank copies to write each expert by itself " +
		"(revert_weight_conversion in transformers/core_model_loading.py)"
}

// full is the share of a rank in what it has by itself.
func full(bytes int64) int64 { return bytes }

// writeModel is save_pretrained of a model on the GPU, by the first rank. Programs that do not use it save tensors one
// after the other.
func (s *simulation) writeModel() {
	if s.OnCPU {
		return
	}
	parameters := s.savedParameters()
	bytes := largestOf(parameters) * s.ParameterType.Size()
	if s.Saving.FileBytes > 0 {
		bytes = min(bytesStored(parameters), s.Saving.FileBytes)
	}
	s.reverts(s.gpu, full, func() { s.host.briefly(s.perNode(bytes), ledger.CheckpointCopies, s.whyCopies) })
}

// writeStates is torch.save of an optimizer on the GPU, by the first rank.
func (s *simulation) writeStates() {
	_, largest := s.fullStatesOf(s.trained)
	if s.OnCPU || s.Saving.ModelOnly || s.states != nil {
		return
	}
	s.host.briefly(s.perNode(largest), ledger.CheckpointCopies, s.whyCopies)
}

const whyStorages = "torch.save copies the storages of a GPU to the host one after the other (torch/serialization.py)"

func (s *simulation) whyCopies() string {
	what := ""
	if s.Saving.FileBytes > 0 {
		what = fmt.Sprintf("safetensors copies all tensors of a file before it writes them, up to %d GB; ",
			s.Saving.FileBytes/1_000_000_000)
	}
	return "on their way from the GPU of the first rank to files, here a part of each rank of its node: " + what +
		whyStorages
}

// readStates is what the Trainer reads of an optimizer without an engine. One rank reads it on the host. Several read
// it to their GPUs, storage by storage (_load_optimizer_and_scheduler in transformers/trainer.py).
func (s *simulation) readStates() {
	sum, largest := s.fullStatesOf(s.trained)
	if s.OnCPU || s.Saving.ModelOnly || s.states != nil {
		return
	}
	if s.World > 1 {
		s.host.briefly(largest, ledger.LoadedCheckpoint, s.whyRead)
		return
	}
	s.host.briefly(sum, ledger.LoadedCheckpoint, s.whyRead)
}

func (s *simulation) whyRead() string {
	return "the states of the optimizer, which a single rank reads on the host, and one of several ranks storage by " +
		"storage on its GPU (_load_optimizer_and_scheduler in transformers/trainer.py)"
}

// save writes what the engine has on the rank, and the model.
func (e *deepSpeed) save() {
	if e.Saving.Clones && e.Stage == nil {
		clones := e.host.hold(e.storedBytes(), ledger.CheckpointCopies, e.whyCopies)
		e.reverts(e.host, e.perNode, clones.free)
	}
	if e.Saving.ModelOnly {
		return
	}
	// All parameters of a group are views of one storage.
	var largest int64
	for _, group := range e.groups {
		largest = max(largest, elementsOf(group)*e.ParameterType.Size())
	}
	e.host.briefly(e.perNode(largest), ledger.CheckpointCopies, e.whyCopies)
	e.writeShard()
}

func (e *deepSpeed) whyCopies() string {
	if !e.Saving.Clones || e.Stage != nil {
		return whyStorages
	}
	return fmt.Sprintf("every rank clones all %s parameters in %v on the host, though only the first one writes them "+
		"(Accelerator.get_state_dict, clone_tensors_for_torch_save; a loop that calls save_checkpoint alone does not)"+
		"; then %s", ledger.Count(elementsOf(e.parameters)), e.ParameterType, whyStorages)
}

// writeShard writes the rank's master weights and states: one flat tensor after the other, if they are on the GPU.
func (e *deepSpeed) writeShard() {
	if e.offloads() {
		return
	}
	bytes := largestOf(e.flat) * max(e.master.Size(), e.ParameterType.Size())
	if e.recipe.ZeROStage == 0 {
		bytes = e.perNode(bytes)
	}
	e.host.briefly(bytes, ledger.CheckpointCopies, e.whyCopies)
}

// resume reads the model, and then the rank's shard, each from a file in full (load_checkpoint).
func (e *deepSpeed) resume() {
	if e.Saving.ModelOnly || e.Stage != nil {
		return
	}
	e.host.briefly(bytesStored(e.savedParameters()), ledger.LoadedCheckpoint, e.whyLoaded)
	e.readShard()
}

// readShard reads the rank's master weights and states. States of an optimizer on the host stay where they are read.
func (e *deepSpeed) readShard() {
	bytes := elementsOf(e.flat) * e.master.Size()
	switch e.recipe.OffloadOptimizer.Device {
	case "none":
		bytes += e.moments(e.flat)
	case "nvme":
		return
	}
	e.host.briefly(bytes, ledger.LoadedCheckpoint, e.whyLoaded)
}

func (e *deepSpeed) whyLoaded() string {
	return "files that every rank reads in full on the host: the model, and then its own part of master weights and " +
		"states; it frees one before it reads the next (load_checkpoint in deepspeed/runtime/engine.py)"
}

// save gathers the full model on the host of rank 0 for a checkpoint. The ranks of its node share the memory equally in
// the plan.
func (e *zero3) save() {
	if e.recipe.GatherOnSave {
		parameters := e.savedParameters()
		for _, p := range parameters {
			e.gpu.briefly(e.gathers()*2*p.Bytes(), ledger.GatheredParameters, e.coordinator.whyGathered)
		}
		gathered := e.host.hold(e.perNode(bytesStored(parameters)), ledger.FullStateDict, because("the model on the "+
			"host of rank 0: %s parameters x %d B, here a part of each rank of its node",
			ledger.Count(elementsOf(parameters)), e.ParameterType.Size()))
		e.reverts(e.host, e.perNode, gathered.free)
	}
	if !e.Saving.ModelOnly {
		e.writeShard()
	}
}

// resume reads the rank's shard. The file of the model has no parameters.
func (e *zero3) resume() {
	if !e.Saving.ModelOnly {
		e.readShard()
	}
}

// save gathers what is saved on the host of the first rank for a full state_dict: the model, and then the states of the
// optimizer. It gathers one parameter at a time on the GPU. The other ranks of its node hold none of it (rank0_only). A
// sharded checkpoint is written tensor by tensor.
func (e *fsdp) save() {
	if e.FSDP.StateDictType != "full_state_dict" {
		return
	}
	model, largest := e.fullModel(e.parameters)
	e.gpu.during(largest, ledger.GatheredParameters, e.whyGathered, func() {
		gathered := e.host.hold(e.perNode(model), ledger.FullStateDict, e.whyFullStateDict)
		e.reverts(e.host, e.perNode, gathered.free)
	})
	if e.Saving.ModelOnly || e.states != nil {
		return
	}
	states, largest := e.fullStates()
	e.gpu.during(largest, ledger.GatheredParameters, e.whyGathered, func() {
		e.host.briefly(e.perNode(states), ledger.FullStateDict, e.whyFullStateDict)
	})
}

// fullModel returns the size of parameters in the types of their shards, and of the largest one.
func (e *fsdp) fullModel(parameters []*autograd.Parameter) (sum, largest int64) {
	for _, p := range parameters {
		bytes := p.Elements * e.stored(p).Size()
		sum, largest = sum+bytes, max(largest, bytes)
	}
	return sum, largest
}

// fullStates returns the size of the states of all trained parameters, and of the largest one.
func (e *fsdp) fullStates() (sum, largest int64) {
	var full []*autograd.Parameter
	for _, p := range e.trained {
		q := *p
		q.DType = e.stored(p)
		full = append(full, &q)
	}
	return e.fullStatesOf(full)
}

func (e *fsdp) whyFullStateDict() string {
	model, _ := e.fullModel(e.parameters)
	states, _ := e.fullStates()
	return fmt.Sprintf("on the host of the first rank, here a part of each rank of its node: the full model, %v, and "+
		"then, unless only the model is saved, the full states of the optimizer, %v (FULL_STATE_DICT, rank0_only)",
		ledger.Bytes(model), ledger.Bytes(states))
}

// resume reads a full state_dict. With FSDP1 every rank reads the model, and with FSDP2 the first one does; the first
// one reads the states (load_fsdp_model and load_fsdp_optimizer in accelerate/utils/fsdp_utils.py).
func (e *fsdp) resume() {
	if e.FSDP.StateDictType != "full_state_dict" || e.Saving.ModelOnly || e.states != nil {
		return
	}
	model, _ := e.fullModel(e.savedParameters())
	if e.FSDP.Version == 2 {
		model = e.perNode(model)
	}
	e.host.briefly(model, ledger.LoadedCheckpoint, e.whyLoaded)
	states, _ := e.fullStates()
	e.host.briefly(e.perNode(states), ledger.LoadedCheckpoint, e.whyLoaded)
}

func (e *fsdp) whyLoaded() string {
	who := "every rank reads the full model (FSDP1)"
	if e.FSDP.Version == 2 {
		who = "the first rank reads the full model"
	}
	return who + ", and then the first rank the full states of the optimizer " +
		"(load_fsdp_model and load_fsdp_optimizer in accelerate/utils/fsdp_utils.py)"
}
