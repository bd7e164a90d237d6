package plan

import (
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/steptime"
)

// Time predicts how long a step of the job takes. An error says what the prediction has no basis in.
func (p *Plan) Time(m steptime.Machine) (*steptime.Step, error) {
	return steptime.Predict(p.Job, m, p.Trained, p.offloaded)
}

// TimeOf predicts the step of a job that differs from the planned one in its micro batches only.
func (p *Plan) TimeOf(j *job.Job, m steptime.Machine) (*steptime.Step, error) {
	return steptime.Predict(j, m, p.Trained, p.offloaded)
}
