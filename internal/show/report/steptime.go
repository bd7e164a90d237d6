package report

import (
	"errors"
	"fmt"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/plan/plan"
	"plimsoll/internal/plan/steptime"
)

// StepTime is how long an optimizer step takes, or why that is not said.
type StepTime struct {
	Refused string `json:"refused,omitempty"`
	// The parts are null where the time is refused. Communication and optimizer are what passes do not hide.
	Total         *Seconds `json:"total_seconds"`
	Forward       *Seconds `json:"forward_seconds"`
	Backward      *Seconds `json:"backward_seconds"`
	Communication *Seconds `json:"communication_seconds"`
	// Pipeline is how long the stage that has most to do waits for others; absent without pipeline stages.
	Pipeline  *Seconds `json:"pipeline_seconds,omitempty"`
	Optimizer *Seconds `json:"optimizer_seconds"`
	Tokens    int64    `json:"tokens,omitempty"` // of a step, on all ranks
	// HiddenFrom is T*: the tokens of a micro batch from which on the next forward pass hides an exact update by the
	// optimizer service.
	HiddenFrom int64    `json:"hidden_from_tokens,omitempty"`
	Sources    []string `json:"sources,omitempty"` // of rates that are not of the data sheet
	Assumed    []string `json:"assumed,omitempty"` // rates that nobody says
}

// Seconds are what is expected, and the ends of its interval.
type Seconds struct {
	Expected float64 `json:"expected"`
	Least    float64 `json:"least"`
	Most     float64 `json:"most"`
}

func secondsOf(t steptime.Time) *Seconds {
	return &Seconds{t.Expected.Seconds(), t.Least.Seconds(), t.Most.Seconds()}
}

// NewStepTime makes the document of a plan's time.
func NewStepTime(p *plan.Plan, m steptime.Machine, sources []string) (*StepTime, error) {
	step, err := p.Time(m)
	var refused *fault.Input
	switch {
	case errors.As(err, &refused):
		return &StepTime{Refused: refused.What}, nil
	case err != nil:
		return nil, err
	}
	return stepTimeOf(step, sources), nil
}

func stepTimeOf(step *steptime.Step, sources []string) *StepTime {
	d := &StepTime{Total: secondsOf(step.Total), Forward: secondsOf(step.Forward), Sources: sources,
		Backward: secondsOf(step.Backward), Communication: secondsOf(step.Communication), Tokens: step.Tokens,
		Optimizer: secondsOf(step.Optimizer), HiddenFrom: int64(step.HiddenFrom), Assumed: step.Assumed}
	if step.Pipeline.Most > 0 {
		d.Pipeline = secondsOf(step.Pipeline)
	}
	return d
}

// addTo adds the time to the facts of a page.
func (s *StepTime) addTo(facts *Facts) {
	switch {
	case s == nil:
		return
	case s.Refused != "":
		facts.add("step", "%s", s.Refused)
		return
	}
	waits := ""
	if s.Pipeline != nil {
		waits = ", waits for other stages " + seconds(s.Pipeline.Expected)
	}
	facts.add("step", "%s (%s to %s): forward %s, backward %s%s, not hidden: communication %s, optimizer %s",
		seconds(s.Total.Expected), seconds(s.Total.Least), seconds(s.Total.Most), seconds(s.Forward.Expected),
		seconds(s.Backward.Expected), waits, seconds(s.Communication.Expected), seconds(s.Optimizer.Expected))
	facts.addEach("assumed", s.Assumed)
}

// seconds returns three significant digits.
func seconds(s float64) string {
	switch {
	case s < 1e-3:
		return fmt.Sprintf("%.3g us", 1e6*s)
	case s < 1:
		return fmt.Sprintf("%.3g ms", 1e3*s)
	}
	return fmt.Sprintf("%.3g s", s)
}
