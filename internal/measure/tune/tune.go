//go:build linux

package tune

import (
	"context"
	"time"

	"plimsoll/internal/base/activity"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/measure/bench"
	"plimsoll/internal/measure/profile"
	"plimsoll/internal/state/optim/kernel"
)

// task is a pair of curves to measure.
type task struct {
	format kernel.Format
	ranks  int
	node   *host.NUMANode // nil for all nodes
}

// session is a tuning under way.
type session struct {
	*Tuning
	found    *profile.Profile
	progress activity.Progress
	ends     time.Time // the budget's end
	counted  time.Time // until when progress has been reported
	trainers map[int]*Curve
	commands *commands // nil without a command
}

// Run measures the host. It keeps to the budget, but for the fewest points that a search needs. Formats other than the
// request's own are left out where there is no time for them.
func (t *Tuning) Run(ctx context.Context, version string, progress activity.Progress) (*profile.Profile, error) {
	now := time.Now()
	s := &session{Tuning: t, progress: progress, ends: now.Add(t.Budget), counted: now, trainers: map[int]*Curve{}}
	s.found = &profile.Profile{
		Measured: now.UTC().Truncate(time.Second), Version: version, Topology: profile.TopologyOf(t.Host),
		Limits: profile.LimitsOf(t.Host), State: t.State, Moments: t.Moments, Overlap: t.Overlap,
		Load: profile.LoadBuiltIn, Command: append([]string{}, t.Command...), ShareOfBest: t.ShareOfBest,
		Curves: []profile.Curve{}, TrainerTimes: []profile.TrainerTimes{}, Splits: []profile.Split{},
	}
	progress.Begin("measuring this host", int64(t.Budget/time.Second), activity.Shares)
	defer progress.End()
	others, err := bench.WatchOthers(t.Host.CPUs)
	if err != nil {
		return nil, err
	}
	for _, ranks := range t.Ranks {
		if err := s.prepareTrainer(ctx, ranks); err != nil {
			return nil, err
		}
	}
	for i, tasks := 0, s.tasks(); i < len(tasks); i++ {
		if tasks[i].format != t.formats[0] && time.Now().After(s.ends) {
			break
		}
		if err := s.measure(ctx, tasks[i], s.endOfFirst(len(tasks)-i)); err != nil {
			return nil, err
		}
	}
	s.putTrainers()
	if s.commands == nil {
		if s.found.Others, err = others.Share(); err != nil {
			return nil, err
		}
	}
	s.found.Links, s.found.LinksNote = links(ctx, t.Host)
	return s.found, nil
}

// putTrainers adds the times of the trainer to the profile.
func (s *session) putTrainers() {
	for _, ranks := range s.Ranks {
		times := profile.TrainerTimes{Ranks: ranks, Points: []profile.TrainerPoint{}}
		for _, p := range s.trainers[ranks].Points() {
			times.Points = append(times.Points, profile.TrainerPoint{Cores: p.Cores, Seconds: p.Seconds,
				Samples: p.Samples})
		}
		s.found.TrainerTimes = append(s.found.TrainerTimes, times)
	}
	if s.commands != nil {
		s.found.Load, s.found.LoadTimes, s.found.StepsHoldUpdate = profile.LoadCommand, s.commands.times,
			s.commands.service
	}
}

// tasks lists what to measure: the request's format first, which decides the splits of run and serve.
func (s *session) tasks() (tasks []task) {
	for _, format := range s.formats {
		for _, ranks := range s.Ranks {
			tasks = append(tasks, task{format: format, ranks: ranks})
		}
		if nodes := s.nodes(); format == s.formats[0] && len(nodes) > 1 {
			for i := range nodes {
				tasks = append(tasks, task{format: format, ranks: 1, node: &nodes[i]})
			}
		}
	}
	return tasks
}

// endOfFirst returns the end of the first of some tasks, which divide the time that is left after the runs of a
// command. The first one runs it.
func (s *session) endOfFirst(tasks int) time.Time {
	begin := time.Now()
	if s.commands != nil && s.commands.deadline.After(begin) && len(s.found.Curves) == 0 {
		begin = s.commands.deadline
	}
	return begin.Add(s.ends.Sub(begin) / time.Duration(tasks))
}

// lateAfter reports whether a time has passed, and advances the progress.
func (s *session) lateAfter(end time.Time) func() bool {
	return func() bool {
		now := time.Now()
		if more := min(now.Sub(s.counted), s.ends.Sub(s.counted)) / time.Second; more > 0 {
			s.progress.Advance(int64(more))
			s.counted = s.counted.Add(more * time.Second)
		}
		return now.After(end)
	}
}

// commandShare is the part of the budget that runs of a command have.
const commandShare = 0.6

// prepareTrainer makes the curve of the trainer's time, of which nothing is measured yet.
func (s *session) prepareTrainer(ctx context.Context, ranks int) error {
	if len(s.Command) == 0 {
		late := s.lateAfter(s.ends)
		s.trainers[ranks] = NewCurve(s.imitation(ctx, ranks), mostPoints, late)
		return nil
	}
	cores, err := coresOf(s.Host, ranks)
	if err != nil {
		return err
	}
	end := time.Now().Add(time.Duration(commandShare * float64(time.Until(s.ends))))
	c := &commands{Tuning: s.Tuning, cores: cores, ranks: ranks, deadline: end}
	s.commands = c
	s.trainers[ranks] = NewCurve(func(cores int, _ func([]float64) bool) ([]float64, error) {
		defer s.lateAfter(s.ends)() // advances the progress
		return c.measure(ctx, cores)
	}, mostRuns, c.late)
	return nil
}

// measure measures the curves of a task, and chooses a split if it is for all nodes.
func (s *session) measure(ctx context.Context, t task, end time.Time) error {
	h := s.Host
	node := profile.AllNodes
	if t.node != nil {
		var err error
		if h, err = h.WithAffinity(t.node.CPUs); err != nil {
			return err
		}
		node = t.node.ID
	}
	cores, err := coresOf(h, t.ranks)
	if err != nil {
		return err
	}
	late := s.lateAfter(end)
	update := NewCurve(s.update(ctx, h, t.format, t.ranks), mostPoints, late)
	trainer := s.trainers[t.ranks]
	if t.node != nil {
		trainer = NewCurve(func(int, func([]float64) bool) ([]float64, error) { return []float64{1}, nil }, mostPoints,
			late)
	}
	search := &Search{Cores: cores, Update: update, Trainer: trainer, Step: s.step(update, trainer),
		Shares: s.Overlap == profile.NoOverlap || t.node != nil}
	choice, err := search.Choose()
	if err != nil {
		return err
	}
	knee, err := update.Knee(s.ShareOfBest)
	if err != nil {
		return err
	}
	s.put(t, node, choice, knee, update, trainer)
	return nil
}

// step returns the function that predicts the time of a step. Updates and the trainer's work are taken to be as long as
// each other where both are the fastest, because tune knows no model. The forward pass is a third of the trainer's
// work, and the update is hidden behind what overlaps it.
//
// A command that uses the optimizer service has steps of its own, with all that is in them.
func (s *session) step(update, trainer *Curve) func(float64, float64) float64 {
	return func(updating, training float64) float64 {
		updating, training = updating/update.Least(), training/trainer.Least()
		switch {
		case s.commands != nil && s.commands.service:
			return training
		case s.Overlap == profile.OverlapForward:
			return training + max(0, updating-training/3)
		case s.Overlap == profile.OverlapBackward:
			return max(training, updating)
		}
		return training + updating
	}
}

// put adds the results of a task to the profile.
func (s *session) put(t task, node int, choice Choice, knee int, update, trainer *Curve) {
	config, err := s.shard(t.format, s.Elements, 0, nil)
	if err != nil {
		return // as the task would have failed
	}
	bytes := float64(config.TrafficBytes())
	c := profile.Curve{
		Ranks: t.ranks, NUMANode: node, State: t.format.State.String(), Moments: t.format.Moments.String(),
		BytesPerParameter: bytes / float64(s.Elements), Knee: knee,
	}
	for _, p := range update.Points() {
		c.Points = append(c.Points, profile.Point{Cores: p.Cores, BytesPerSecond: bytes / p.Seconds,
			Samples: p.Samples, Uncertainty: p.Uncertainty})
	}
	s.found.Curves = append(s.found.Curves, c)
	if t.node == nil {
		s.found.Splits = append(s.found.Splits, profile.Split{
			Ranks: t.ranks, State: c.State, Moments: c.Moments, Trainer: choice.Trainer, Optimizer: choice.Optimizer,
			Shared: choice.Shared, BytesPerSecond: bytes / update.Seconds(choice.Optimizer),
			Slowdown: trainer.Seconds(choice.Trainer) / trainer.Least(),
		})
	}
}
