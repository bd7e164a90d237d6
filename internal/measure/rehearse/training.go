//go:build linux

package rehearse

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/state/engine"
	"plimsoll/internal/state/optim"
	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
	"plimsoll/internal/state/synthetic"
)

// training holds the shards of a job on this host and makes their steps.
type training struct {
	shards    []*engine.Shard
	important []*engine.Shard // of the important columns of each rank; none without ZenFlow
	engine    *engine.Engine  // of shards
	scaler    optim.LossScaler
	scaled    *synthetic.ScaledGradients // nil where the loss is not scaled
	paced     *trainer                   // nil where the steps follow each other at once
}

// begin maps the arenas, which are still empty. The caller must close what begin returns, even after an error.
func (p *Placement) begin() (*training, error) {
	t := &training{scaler: p.LossScaler}
	var recorders []*recorder
	for i, config := range p.allShards() {
		if p.Pace != nil {
			r := newRecorder(config, p.Pace.updates(config))
			config.Observe = r.observe
			recorders = append(recorders, r)
		}
		s, err := engine.NewShard(config)
		if err != nil {
			return t, err
		}
		if i < len(p.Shards) {
			t.shards = append(t.shards, s)
		} else {
			t.important = append(t.important, s)
		}
	}
	if p.Pace != nil {
		var err error
		if t.paced, err = p.newTrainer(t, recorders); err != nil {
			return t, err
		}
	}
	if p.ScalesLoss() {
		t.scaled = synthetic.NewScaledGradients(p.Format.Gradient)
	}
	var err error
	t.engine, err = engine.New(t.shards, []optim.Optimizer{p.Optimizer}, p.Clip)
	return t, err
}

// close gives the arenas back.
func (t *training) close() (err error) {
	if t.paced != nil {
		t.paced.close()
	}
	for _, s := range t.all() {
		err = errors.Join(err, s.Close())
	}
	return err
}

// all returns all shards that are mapped.
func (t *training) all() []*engine.Shard { return slices.Concat(t.shards, t.important) }

// each walks all shards, one after the other; each shard uses its own workers.
func (t *training) each(body func(s *engine.Shard, first int64, c kernel.Chunk)) {
	for _, s := range t.all() {
		s.Each(func(at shard.Chunk, c kernel.Chunk) { body(s, at.First, c) })
	}
}

// step does what a trainer does. It makes gradients of a scaled loss, unscales them in the optimizer step, and
// chooses the next scale. An overflow skips the update.
//
// The same traffic without arithmetic follows. It stores into the write-only parameters, so a skipped step goes
// without it.
func (t *training) step(i int) (Step, error) {
	step := Step{LossScale: t.scaler.Scale()}
	backward := synthetic.Gradients
	if t.scaled != nil {
		t.scaled.SetScale(step.LossScale)
		backward = t.scaled.Write
	}
	for _, s := range t.all() {
		s.EachGradient(func(at shard.Chunk, gradient kernel.Array) {
			backward(s.Config().Rank, i, at.First, gradient)
		})
	}

	begin := time.Now()
	result := t.engine.Step(step.LossScale)
	if result.Err != nil {
		return step, &fault.Input{What: fmt.Sprintf("step %d", i+1), Err: result.Err}
	}
	step.Seconds = time.Since(begin).Seconds()
	step.NormSeconds, step.UpdateSeconds, step.Skipped = result.NormTime.Seconds(), result.UpdateTime.Seconds(),
		result.Skipped
	if !step.Skipped {
		step.GradientNorm = result.GradientNorm
		begin = time.Now()
		t.engine.Traffic()
		step.TrafficSeconds = time.Since(begin).Seconds()
	}

	if err := t.scaler.Update(step.Skipped); err != nil {
		return step, &fault.Input{
			What: fmt.Sprintf("step %d", i+1), Err: err,
			Hint: fmt.Sprintf("lower min_loss_scale (--min-loss-scale): the largest synthetic gradient is %d, and "+
				"fp16 ends at 65504; DeepSpeed would end here, too", synthetic.Outlier),
		}
	}
	return step, nil
}
