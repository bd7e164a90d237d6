package lever

import (
	"fmt"
	"math"

	"plimsoll/internal/input/amend"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/input/rollout"
	"plimsoll/internal/plan/job"
)

// Settings of an engine that generates answers. The value of each is a word of --rollout.
const (
	engineSleep     recipe.Setting = "sleep of the rollout engine"
	engineFraction  recipe.Setting = "fraction of the rollout engine"
	engineLogProbs  recipe.Setting = "log-probabilities of answers"
	engineReference recipe.Setting = "place of the frozen model"
	engineBackups   recipe.Setting = "backups of the trainer"
	engineServer    recipe.Setting = "place of the rollout engine"
)

// engineFlag changes a setting of the engine that the request or a file says.
var engineFlag = requestFlag{
	given: always,
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
	return when(e != nil && e.Sleep < 2 && j.Adapter == nil, to(engineSleep, "sleep=2"))
}

// smallerFraction lowers the share of the GPU in steps of a tenth.
func smallerFraction(j *job.Job) (ways [][]amend.Setting) {
	e := engineOf(j)
	if e == nil {
		return nil
	}
	for less := e.Fraction - .1; less >= .15; less -= .1 {
		ways = append(ways, []amend.Setting{to(engineFraction, fmt.Sprintf("fraction=%g", math.Round(less*100)/100))})
	}
	return ways
}

func chunkedLogProbs(j *job.Job) [][]amend.Setting {
	return when(j.Rollout != nil && !j.Rollout.ChunkedLogProbs && j.Megatron == nil,
		to(engineLogProbs, "log-probs=chunked"))
}

func referenceOnHost(j *job.Job) [][]amend.Setting {
	return when(j.Rollout != nil && !j.Rollout.HostReference && j.Reference != nil,
		to(engineReference, "reference=host"))
}

func trainerOnHost(j *job.Job) [][]amend.Setting {
	e := engineOf(j)
	return when(e != nil && !e.Backups.All(), to(engineBackups, "backups=all"))
}

func withoutBackups(j *job.Job) [][]amend.Setting {
	e := engineOf(j)
	return when(e != nil && e.Backups.Any(), to(engineBackups, "backups=none"))
}

func engineElsewhere(j *job.Job) [][]amend.Setting {
	return when(engineOf(j) != nil, to(engineServer, "server"))
}
