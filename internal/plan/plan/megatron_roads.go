package plan

import (
	"cmp"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
)

// megatronRoads are Megatron-LM's own ways to keep states on the host, by their settings. The first one is that of
// states that stay on the GPU.
var megatronRoads = []struct {
	name string
	on   recipe.Setting
}{
	{ResidentRoad, ""}, {"whole, between steps", recipe.StatesOffload}, {"in chunks", recipe.ChunkedStatesOffload},
	{"update by the CPU", recipe.OptimizerOffload},
}

// NewMegatronRoads compares the roads of a job of Megatron-LM, each planned by the argument for it. Times are not
// predicted.
func NewMegatronRoads(q job.Request) (*Roads, error) {
	r := &Roads{}
	var resident ledger.Bytes // states on a GPU in the passes
	for _, road := range megatronRoads {
		p, err := onMegatronRoad(q, road.on)
		if err != nil {
			return nil, err
		}
		gpu, host := &p.Devices[0], &p.Devices[len(p.Devices)-1]
		last := steadyStep(gpu) // behind a backward pass
		between := statesIn(gpu.Phases[last-1].Components)
		name := road.name
		if r.Job = cmp.Or(r.Job, p.Job); road.on == "" {
			resident = between
		} else {
			name = recipe.ArgumentOf(road.on, true).String()
		}
		r.Roads = append(r.Roads, Road{Name: name, Host: reservedInSteps(host), Pinned: p.pinned,
			Freed: resident - between, Window: statesIn(gpu.Phases[last].Components), GPU: gpu.Peak().PeakUsed,
			Verdict: p.Verdict.Result})
	}
	return r, nil
}

// steadyStep returns the index of the last step. Behind it a checkpoint is saved.
func steadyStep(d *ledger.Device) int {
	return slices.IndexFunc(d.Phases, func(p ledger.Phase) bool {
		return p.Name == ledger.Step && p.Iteration == ledger.Steady
	})
}

// reservedInSteps returns what a device reserves at most until the last step ends.
func reservedInSteps(d *ledger.Device) (most ledger.Bytes) {
	for _, p := range d.Phases[:steadyStep(d)+1] {
		most = max(most, p.PeakReserved)
	}
	return most
}

// onMegatronRoad plans the job with its states on one road.
func onMegatronRoad(q job.Request, on recipe.Setting) (*Plan, error) {
	q.Arguments = nil
	for _, road := range megatronRoads[1:] {
		q.Arguments = append(q.Arguments, recipe.ArgumentOf(road.on, road.on == on))
	}
	if on != "" {
		q.Arguments = append(q.Arguments, recipe.ArgumentOf(recipe.DistributedOptimizer, true))
	}
	if on == recipe.OptimizerOffload {
		q.Arguments = append(q.Arguments, recipe.ArgumentOf(recipe.PrecisionAware, true))
	}
	j, err := q.Resolve()
	if err != nil {
		return nil, err
	}
	return New(j)
}

// statesIn sums the master weights and the states of the optimizer.
func statesIn(held []ledger.Holding) (bytes ledger.Bytes) {
	for _, h := range held {
		if c := cmp.Or(h.Component.PartOf(), h.Component); c == ledger.MasterWeights || c == ledger.OptimizerStates {
			bytes += h.Bytes
		}
	}
	return bytes
}
