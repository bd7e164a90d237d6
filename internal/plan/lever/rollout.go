package lever

import (
	"fmt"
	"math"

	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/rollout"
	"plimsoll/internal/plan/job"
)

// engineFlag changes a setting of the engine that the request or a file says. The value is a word of --rollout.
var engineFlag = requestFlag{
	given: func(q *job.Request) bool { return q.Rollout != "" },
	set:   func(q *job.Request, to any) { q.Rollout = rollout.With(q.Rollout, fmt.Sprint(to)) },
	says:  func(to any) string { return fmt.Sprintf("--rollout %v", to) },
}

// engineOf returns the engine on the GPUs of a job, or nil.
func engineOf(j *job.Job) *rollout.Engine {
	if j.Rollout == nil || j.Rollout.Server {
		return nil
	}
	return j.Rollout
}

// sleeping takes the level at which weights are dropped: the next weight sync brings them. Adapters need the weights
// that they were made for.
func sleeping(j *job.Job) [][]amend.Setting {
	e := engineOf(j)
	return when(e != nil && e.Sleep < 2 && j.Adapter == nil, to(recipe.RolloutSleep, "sleep=2"))
}

// smallerFraction lowers the share of the GPU in steps of a tenth.
func smallerFraction(j *job.Job) (ways [][]amend.Setting) {
	e := engineOf(j)
	if e == nil {
		return nil
	}
	for less := e.Fraction - .1; less >= .15; less -= .1 {
		word := fmt.Sprintf("fraction=%g", math.Round(less*100)/100)
		ways = append(ways, []amend.Setting{to(recipe.RolloutFraction, word)})
	}
	return ways
}

func chunkedLogProbs(j *job.Job) [][]amend.Setting {
	return when(j.Rollout != nil && !j.Rollout.ChunkedLogProbs && j.Megatron == nil,
		to(recipe.RolloutLogProbs, "log-probs=chunked"))
}

// fewerJudged halves the sequences whose log-probabilities are made in a pass, which is one of its own.
func fewerJudged(j *job.Job) (ways [][]amend.Setting) {
	if j.Rollout == nil || j.Megatron != nil {
		return nil
	}
	for n := j.Rollout.LogProbsBatch / 2; n >= 1; n /= 2 {
		ways = append(ways, []amend.Setting{to(recipe.RolloutJudged, fmt.Sprintf("log-probs-batch=%d", n))})
	}
	return ways
}

// boundedSamples ends samples that nothing else bounds where micro batches are as planned.
func boundedSamples(j *job.Job) [][]amend.Setting {
	return when(j.Rollout != nil && j.Rollout.LongestSample != 0, to(recipe.SampleBound, int(j.Sequence)))
}

func referenceOnHost(j *job.Job) [][]amend.Setting {
	return when(j.Rollout != nil && !j.Rollout.HostReference && j.Reference != nil,
		to(recipe.RolloutReference, "reference=host"))
}

func trainerOnHost(j *job.Job) [][]amend.Setting {
	e := engineOf(j)
	return when(e != nil && !e.Backups.All(), to(recipe.RolloutBackups, "backups=all"))
}

func withoutBackups(j *job.Job) [][]amend.Setting {
	e := engineOf(j)
	return when(e != nil && e.Backups.Any(), to(recipe.RolloutBackups, "backups=none"))
}

func engineElsewhere(j *job.Job) [][]amend.Setting {
	return when(engineOf(j) != nil, to(recipe.RolloutServer, "server"))
}
