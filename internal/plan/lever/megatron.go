package lever

import (
	"maps"

	"plimsoll/internal/base/files"
	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
)

// added begins what is said of an argument of Megatron-LM that no file can take: the user adds it.
const added = "add "

// megatronFlags say settings of a job of Megatron-LM: arguments behind those of the request, and the nodes.
var megatronFlags = argumentFlags()

func argumentFlags() map[recipe.Setting]requestFlag {
	never := func(*job.Request) bool { return false }
	all := map[recipe.Setting]requestFlag{nodes: flags[nodes],
		recipe.RolloutSleep: engineFlag, recipe.RolloutFraction: engineFlag,
		recipe.RolloutBackups: engineFlag, recipe.RolloutServer: engineFlag,
		recipe.Accumulation: {given: never, set: func(*job.Request, any) {}}} // it follows from the batch of all ranks
	for _, setting := range recipe.MegatronSettings() {
		all[setting] = requestFlag{
			given: never,
			set: func(q *job.Request, to any) {
				q.Arguments = append(q.Arguments[:len(q.Arguments):len(q.Arguments)], recipe.ArgumentOf(setting, to))
			},
			says: func(to any) string {
				argument := recipe.ArgumentOf(setting, to)
				if argument.To == nil || argument.To == false {
					return argument.String()
				}
				return added + argument.String()
			},
		}
	}
	return all
}

// bridgeFlags say settings of a job of Megatron-Bridge by the keys of its recipes.
var bridgeFlags = ownFlags()

func ownFlags() map[recipe.Setting]requestFlag {
	all := maps.Clone(megatronFlags)
	for _, setting := range recipe.MegatronSettings() {
		flag := all[setting]
		if recipe.BridgeAssignment(setting, true) == "" {
			delete(all, setting)
			continue
		}
		flag.says = func(to any) string { return added + recipe.BridgeAssignment(setting, to) }
		all[setting] = flag
	}
	return all
}

// flagsBeside are the flags that say settings beside a file. A program that makes arguments of Megatron-LM of its own
// keys has no others than those that it has, too.
func flagsBeside(file string, texts files.Texts) map[recipe.Setting]requestFlag {
	if recipe.IsBridge(file, texts) {
		return bridgeFlags
	}
	s, err := recipe.LoadSettings(file, texts)
	if err != nil || s == nil || !s.Translated() {
		return megatronFlags
	}
	own := map[recipe.Setting]requestFlag{}
	for setting, flag := range megatronFlags {
		if recipe.ArgumentOf(setting, nil).Key == "" || s.SaysAsMegatron(setting) {
			own[setting] = flag
		}
	}
	return own
}

// Costs of settings in the order of the time that they take. Times of Megatron-LM are not predicted, so its changes are
// put in this order.
var costs = map[recipe.Setting]float64{recipe.MicroBatch: 1, recipe.StatesOffload: 2, recipe.RecomputeGranularity: 3,
	recipe.RecomputeLayers: 4, recipe.TensorDegree: 5, recipe.ContextDegree: 5, recipe.PipelineDegree: 6,
	recipe.OptimizerOffload: 7}

// otherMachines is the cost of a change that takes GPUs beside those of the job. It is more than that of any other.
const otherMachines = 100

// cost returns the largest cost of the settings of a change, and 0 where times are predicted. A small micro batch costs
// more than a large one.
func (w *weigher) cost(c *Change) (most float64) {
	for _, s := range c.idea.settings {
		if s.Name == recipe.RolloutServer {
			return otherMachines
		}
		cost := costs[s.Name]
		if micro, ok := s.To.(int); ok && s.Name == recipe.MicroBatch {
			cost += 0.5 / float64(micro)
		}
		if w.Plan.Job.Megatron != nil {
			most = max(most, cost)
		}
	}
	return most
}

func sequenceParallel(j *job.Job) [][]amend.Setting {
	m := j.Megatron
	return when(m != nil && m.Degrees.Tensor > 1 && !m.SequenceSplit, to(recipe.SequenceSplit, true))
}

// packs reports whether a program packs samples into micro batches of so many tokens.
func packs(j *job.Job) bool {
	return j.Megatron != nil && j.Megatron.Policy != nil && j.Megatron.Policy.Packs
}

// fewerTokens lists smaller sizes of packed micro batches, as a rank counts them.
func fewerTokens(j *job.Job) (ways [][]amend.Setting) {
	for tokens := j.Megatron.Policy.PackedTokens / 2; tokens >= 1024; tokens /= 2 {
		ways = append(ways, []amend.Setting{to(recipe.PackedTokens, int(tokens))})
	}
	return ways
}

func distributedOptimizer(j *job.Job) [][]amend.Setting {
	m := j.Megatron
	return when(m != nil && !m.Distributed && m.Degrees.Data*m.Degrees.Context > 1,
		to(recipe.DistributedOptimizer, true))
}

func fusedLoss(j *job.Job) [][]amend.Setting {
	m := j.Megatron
	return when(m != nil && m.Policy == nil && !m.FusesLoss && m.TransformerEngine(), to(recipe.FusedLoss, true),
		to(recipe.FusedLossBy, "te"))
}

func recomputingAttention(j *job.Job) [][]amend.Setting {
	m := j.Megatron
	return when(m != nil && m.Recompute == "", to(recipe.RecomputeGranularity, "selective"))
}

// offloadsStates reports whether states of a job of Megatron-LM are on the host.
func offloadsStates(j *job.Job) bool {
	m := j.Megatron
	return m.CPUOffload || m.OffloadStates || m.ChunkedOffload
}

func statesBetweenSteps(j *job.Job) [][]amend.Setting {
	return when(j.Megatron != nil && !offloadsStates(j), to(recipe.DistributedOptimizer, true),
		to(recipe.StatesOffload, true))
}

func megatronOptimizerOnHost(j *job.Job) [][]amend.Setting {
	return when(j.Megatron != nil && !offloadsStates(j), to(recipe.DistributedOptimizer, true),
		to(recipe.PrecisionAware, true), to(recipe.OptimizerOffload, true))
}

func megatronStatesOnGPU(j *job.Job) (ways [][]amend.Setting) {
	m := j.Megatron
	if m == nil {
		return nil
	}
	for fraction := m.OffloadFraction / 2; m.CPUOffload && fraction > 0.2; fraction /= 2 {
		ways = append(ways, []amend.Setting{to(recipe.OffloadFraction, fraction)})
	}
	ways = append(ways, when(m.CPUOffload, to(recipe.OptimizerOffload, false))...)
	ways = append(ways, when(m.OffloadStates, to(recipe.StatesOffload, false))...)
	return append(ways, when(m.ChunkedOffload, to(recipe.ChunkedStatesOffload, false))...)
}

// degree returns twice a degree with the same batch of all ranks.
func degree(j *job.Job, name recipe.Setting, is int64, more ...amend.Setting) [][]amend.Setting {
	if packs(j) { // the program makes micro batches of as many tokens as fit
		return when(j.Megatron.Degrees.Data%2 == 0, append([]amend.Setting{to(name, int(2*is))}, more...)...)
	}
	return when(j.Megatron.Degrees.Data%2 == 0, append([]amend.Setting{to(name, int(2*is)),
		to(recipe.Accumulation, 2*j.Accumulation), to(recipe.TrainBatch, int(j.Megatron.GlobalBatch))}, more...)...)
}

// moreTensorParallel keeps the ranks that share layers on one node.
func moreTensorParallel(j *job.Job) [][]amend.Setting {
	if j.Megatron == nil || 2*j.Parallel.Tensor > int64(j.RanksPerNode) {
		return nil
	}
	return degree(j, recipe.TensorDegree, j.Parallel.Tensor, to(recipe.SequenceSplit, true))
}

func moreContextParallel(j *job.Job) [][]amend.Setting {
	if j.Megatron == nil {
		return nil
	}
	return degree(j, recipe.ContextDegree, j.Parallel.Context)
}

func morePipelineStages(j *job.Job) [][]amend.Setting {
	if j.Megatron == nil {
		return nil
	}
	return degree(j, recipe.PipelineDegree, j.Stages())
}
