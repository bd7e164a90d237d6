package simulate

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/rollout"
	"plimsoll/internal/plan/autograd"
	"plimsoll/internal/plan/forward"
	"plimsoll/internal/plan/job"
)

// companion is a model beside the policy on the GPU of a rank: a critic, or one that rewards answers.
type companion struct {
	*simulation
	of                 *job.Companion
	parameters, states moved // what is on the host between its passes
}

// companionComponents are what a companion's parameters, gradients and states are called. All others have the names of
// the policy's: its passes take turns with those of the policy.
var companionComponents = map[recipe.Role]map[ledger.Component]ledger.Component{
	recipe.Reward: {ledger.ReferenceModel: ledger.RewardModel},
	recipe.Critic: {ledger.Parameters: ledger.CriticParameters, ledger.Gradients: ledger.CriticGradients,
		ledger.AccumulatedGradients: ledger.CriticGradients, ledger.MasterGradients: ledger.CriticGradients,
		ledger.OptimizerStates: ledger.CriticStates, ledger.MasterWeights: ledger.CriticStates,
		ledger.ExpAvg: ledger.CriticStates, ledger.ExpAvgSq: ledger.CriticStates},
}

// newCompanion makes the parameters and the engine of a companion.
func newCompanion(s *simulation, of *job.Companion) *companion {
	if !of.Trains() {
		return &companion{simulation: newFrozen(s, frozenJob(of.Job)), of: of}
	}
	r := &simulation{Job: of.Job, gpu: s.gpu, host: s.host, single: ledger.CriticUpdate, workspaces: 2}
	r.tape = autograd.NewTape(s.gpu, func() string { return r.engine.whyGradients() })
	r.makeParameters()
	r.chooseEngine()
	return &companion{simulation: r, of: of}
}

// as runs body with the companion's names of components.
func (c *companion) as(body func()) {
	names := companionComponents[c.of.Role]
	c.gpu.renamed, c.host.renamed = names, names
	body()
	c.gpu.renamed, c.host.renamed = nil, nil
}

// load loads the model and shards it.
func (c *companion) load() {
	c.as(func() {
		if c.frozen {
			c.loadFrozen()
			return
		}
		c.engine.load()
	})
}

// initialize makes what the engine has before the first batch, and moves what waits on the host.
func (c *companion) initialize() {
	if !c.frozen {
		c.as(c.engine.initialize)
	}
	c.park()
}

// park moves to the host what the program has there between passes: parameters, which every pass needs, and what only
// an update does.
func (c *companion) park() {
	b := c.of.Backups
	c.parameters.from(c.gpu, c.host, map[ledger.Component]bool{ledger.CriticParameters: b.Parameters,
		ledger.RewardModel: b.Parameters})
	c.states.from(c.gpu, c.host, map[ledger.Component]bool{ledger.CriticStates: b.Optimizer,
		ledger.CriticGradients: b.Gradients})
}

// from moves components from the GPU to the host. What is there already stays.
func (m *moved) from(gpu, host *trace, of map[ledger.Component]bool) {
	if len(m.ids) > 0 {
		return
	}
	if ids, bytes := gpu.evict(func(c ledger.Component) bool { return of[c] }); len(ids) > 0 {
		*m = moved{ids, host.hold(int64(bytes), ledger.CompanionBackup, whyCompanionBackup)}
	}
}

func whyCompanionBackup() string {
	return "parameters and optimizer states of other models than the policy, between their passes"
}

// bring brings back what waits on the host.
func (c *companion) bring(from *moved) {
	c.gpu.restore(from.ids)
	drop(&from.copy)
	from.ids = nil
}

// apart frees the caches of a companion with a process of its own, before its update and behind it.
func (c *companion) apart() {
	if c.of.Apart {
		c.gpu.emptyCache()
	}
}

// judge runs a pass without gradients over the answers.
func (c *companion) judge() {
	c.bring(&c.parameters)
	c.as(func() {
		options := c.options()
		options.Batch, options.Sequence, options.OffloadActivations = c.of.Judged, c.of.JudgedSequence, nil
		options.Loss, options.Hooks = forward.NoLoss, c.engine
		var result forward.Result
		c.withoutGradients(func() { result = c.forward(c.tape, c.Model.Network, c.modules, options) })
		c.drop(result)
	})
	c.park()
}

// update trains a critic with a batch, while what moves of the policy is on the host.
func (c *companion) update(iteration ledger.Iteration) {
	if c.frozen {
		return
	}
	c.bring(&c.parameters)
	c.bring(&c.states)
	c.apart()
	c.as(func() { c.iterate(iteration) })
	c.apart()
	c.park()
}

// save writes the checkpoint of a critic.
func (c *companion) save() {
	c.whole(func() { c.engine.save() })
	c.park()
}

// resume reads the checkpoint of a critic.
func (c *companion) resume() { c.whole(func() { c.engine.resume() }) }

// whole runs body with all of a critic on the GPU. A frozen model has no checkpoint.
func (c *companion) whole(body func()) {
	if c.frozen {
		return
	}
	c.bring(&c.parameters)
	c.bring(&c.states)
	c.as(body)
}

// updateCompanions trains critics. A trainer whose parameters leave for the engine has them on the host meanwhile, too.
// Its states are there until its own update.
func (s *simulation) updateCompanions(iteration ledger.Iteration) {
	e := s.rollout
	if len(s.companions) == 0 || e == nil {
		return
	}
	if e.Backups.Parameters {
		e.move(&e.trainer, moves(rollout.Backups{Parameters: true}), ledger.TrainerBackup, e.whyMoved)
		defer e.back(&e.trainer)
	}
	for _, c := range s.companions {
		c.update(iteration)
	}
}
