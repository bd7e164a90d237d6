package explain

import (
	"cmp"
	"fmt"
	"strings"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/lever"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/steptime"
)

// planned plans the user's job once. There is no plan, and no error, if the inputs do not name the job.
func (s *scene) planned() (*plan.Plan, error) {
	if s.Request == nil || s.triedPlan {
		return s.plan, s.planError
	}
	s.triedPlan = true
	var j *job.Job
	if j, s.planError = s.sized(*s.Request).Resolve(); s.planError == nil {
		s.plan, s.planError = plan.New(j)
	}
	return s.plan, s.planError
}

// sized returns the request with what the files say of the machine, unless the request says it itself: as many GPUs as
// ranks are named, the memory of the GPU whose error is read, and the limit of the cgroup or the memory of the host. A
// script of Megatron-LM says its ranks.
func (s *scene) sized(q job.Request) job.Request {
	if q.GPUs == 0 && q.Nodes == 0 && q.Accelerate == "" && q.Megatron == "" && !q.CPU {
		for _, f := range s.findings {
			q.GPUs = max(q.GPUs, s.rankOf(f)+1)
		}
	}
	for _, f := range all[evidence.GPUOutOfMemory](s.findings) {
		if q.GPU == "" && q.GPUMemory == 0 && !q.CPU {
			q.GPUMemory = f.fact.Total.Bytes
		}
	}
	if q.HostMemory == 0 {
		q.HostMemory = cmp.Or(s.groupLimit, s.memory())
	}
	return q
}

// needOf returns what a job lacked whose resource ran out.
func needOf(resource Resource) lever.Need {
	switch resource {
	case GPU:
		return lever.GPUMemory
	case Host, CGroup, NUMANode:
		return lever.HostMemory
	}
	return ""
}

// plannedEdits plans changes of the user's job, those of plimsoll plan, and returns what frees memory of the resource
// in the phase of the failure. A note says what the plan of the job itself has there.
func (s *scene) plannedEdits(top claim, phase *ledger.PhaseName) []Edit {
	need := needOf(top.resource)
	if need == "" {
		return nil
	}
	p, err := s.planned()
	if p == nil {
		s.notPlanned(err)
		return nil
	}
	held, ok := p.Held(need.Device(), phase)
	if !ok {
		return nil
	}
	s.planNote = fmt.Sprintf("The changes were planned for %s, with micro batches of %d x %s tokens on each rank. "+
		"The plan then holds %v at its peak%s: if that is far from what you see, give the flags of your job.",
		p.Job.EngineName(), p.Job.MicroBatch, ledger.Count(p.Job.Sequence), held, wordsOf(phase))
	var m steptime.Machine
	if s.Machine != nil {
		m = s.Machine(p.Job)
	}
	changes, err := lever.For(lever.Question{Need: need, Request: s.sized(*s.Request), Plan: p, Machine: m,
		Phase: phase})
	s.notPlanned(err)
	var list []Edit
	for i := range changes {
		c := &changes[i]
		list = append(list, Edit{Edit: c.First(), Frees: c.Frees(), Why: c.Why, Planned: c})
	}
	return list
}

// notPlanned notes why no change was planned.
func (s *scene) notPlanned(err error) {
	if err == nil {
		return
	}
	what, _, _ := strings.Cut(err.Error(), "\n") // a hint may follow
	s.planNote = "No change was planned, as plimsoll cannot plan the job: " + what + "."
}

func wordsOf(phase *ledger.PhaseName) string {
	if phase == nil {
		return ""
	}
	return phaseWords[*phase]
}
