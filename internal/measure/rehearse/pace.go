//go:build linux

package rehearse

import (
	"fmt"
	"slices"
	"time"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/plan/overlap"
	"plimsoll/internal/state/engine"
)

// PaceRequest is the paced trainer of a rehearsal as a user asks for it. Without a mode there is no trainer, and the
// steps follow each other at once.
type PaceRequest struct {
	Mode                 string
	ForwardMilliseconds  float64
	BackwardMilliseconds float64 // 0 for twice the forward pass
	Layers               int     // 0 for those of the model
	Tokens               int64   // of the microbatch whose forward pass takes that long; 0 for unknown
	// TopKRatio and UpdateInterval are ZenFlow's, by DeepSpeed's names; nil for the defaults.
	TopKRatio      *float64
	UpdateInterval *int
	// ClippedPercent is how many of a hundred steps are clipped behind the backward pass.
	ClippedPercent float64
}

// Pace is a trainer that computes nothing, and whose passes take the time of one that does.
type Pace struct {
	Mode              overlap.Mode
	Forward, Backward time.Duration // if the trainer waits for nothing
	Layers            int           // 0 for those of the model
	Tokens            int64         // 0 for unknown
	// TopKRatio is the share of the columns that are important. UpdateInterval is the number of steps of which one
	// updates all other columns.
	TopKRatio      float64
	UpdateInterval int
	// Speculates says that steps begin during the backward pass although they may be clipped, as ClippedPercent of
	// them are.
	Speculates     bool
	ClippedPercent float64
}

// updates returns how often workers take each chunk of a shard in the steps that the trainer makes at a time.
func (p *Pace) updates(c engine.ShardConfig) int {
	if p.Speculates {
		return 2 // a clipped step is retracted and made again
	}
	if c.Part == importantPart {
		return p.UpdateInterval
	}
	return 1
}

// warmUp returns how many steps come before those that are measured. In the first few of a training, moments change too
// much for a step to be retracted.
func (p *Placement) warmUp() int {
	if p.Pace != nil && p.Pace.Speculates {
		return 10
	}
	return 0
}

// importantPart is the part of the shards of important columns.
const importantPart = "important"

// ZenFlow's defaults: DeepSpeed's share of important columns, and the interval of the examples of its authors.
const (
	defaultTopKRatio      = 0.1
	defaultUpdateInterval = 4
	longestInterval       = 1000
)

// longestPass bounds the time of a pass.
const longestPass = 10 * time.Minute

// backwardForwards is how many times longer than the forward pass a backward pass is: it multiplies matrices twice.
const backwardForwards = 2

// resolve returns the trainer that was asked for, or nil for none.
func (r PaceRequest) resolve() (*Pace, error) {
	switch {
	case r.Mode == "" && r != PaceRequest{}:
		return nil, fault.Inputf("the time of a forward or backward pass, layers or tokens are given, but no overlap").
			WithHint("--overlap forward")
	case r.Mode == "":
		return nil, nil
	case !slices.Contains(overlap.Modes(), r.Mode):
		return nil, fault.Inputf("--overlap is %v", fault.Unknown(r.Mode, overlap.Modes()))
	case r.ForwardMilliseconds == 0:
		return nil, fault.Inputf("--overlap %s needs the time of a forward pass", r.Mode).
			WithHint("--forward-ms 100, as measured in a training, or 2 x parameters x tokens / FLOP/s")
	case r.Layers < 0 || r.Layers > mostLayers:
		return nil, fault.Inputf("--layers is %d: expected 1 to %d", r.Layers, mostLayers)
	case r.Tokens < 0:
		return nil, fault.Inputf("--tokens is %d: expected at least 1", r.Tokens)
	case !(r.ClippedPercent >= 0 && r.ClippedPercent <= 100):
		return nil, fault.Inputf("--clipped-percent is %g: expected 0 to 100", r.ClippedPercent)
	case r.ClippedPercent > 0 && r.Mode != string(overlap.Backward):
		return nil, fault.Inputf("--clipped-percent is given, but --overlap is %s: a clipped step takes longer behind "+
			"the backward pass alone", r.Mode).WithHint("--overlap backward")
	}
	p := &Pace{Mode: overlap.Mode(r.Mode), Layers: r.Layers, Tokens: r.Tokens, ClippedPercent: r.ClippedPercent}
	if err := r.zenFlow(p); err != nil {
		return nil, err
	}
	var err error
	p.Forward, p.Backward, err = r.Passes()
	return p, err
}

// Passes returns the times of the passes; 0 where none were given.
func (r PaceRequest) Passes() (forward, backward time.Duration, err error) {
	milliseconds := r.BackwardMilliseconds
	if milliseconds == 0 {
		milliseconds = backwardForwards * r.ForwardMilliseconds
	}
	if r == (PaceRequest{}) {
		return 0, 0, nil
	}
	for _, pass := range []struct {
		flag  string
		value float64
		to    *time.Duration
	}{{"--forward-ms", r.ForwardMilliseconds, &forward}, {"--backward-ms", milliseconds, &backward}} {
		if *pass.to, err = Milliseconds(pass.flag, pass.value); err != nil {
			return 0, 0, err
		}
	}
	return forward, backward, nil
}

// Milliseconds returns the time that a flag gives.
func Milliseconds(flag string, value float64) (time.Duration, error) {
	longest := float64(longestPass / time.Millisecond)
	if !(value > 0 && value <= longest) {
		return 0, fault.Inputf("%s is %g: expected more than 0, and at most %g", flag, value, longest)
	}
	return time.Duration(value * float64(time.Millisecond)), nil
}

// zenFlow decides the settings of ZenFlow.
func (r PaceRequest) zenFlow(p *Pace) error {
	if p.Mode != overlap.ZenFlow {
		p.UpdateInterval = 1
		if r.TopKRatio != nil || r.UpdateInterval != nil {
			return fault.Inputf("--topk-ratio and --update-interval are ZenFlow's, but --overlap is %s", p.Mode).
				WithHint("--overlap zenflow")
		}
		return nil
	}
	p.TopKRatio, p.UpdateInterval = defaultTopKRatio, defaultUpdateInterval
	set(new(string), "", &p.TopKRatio, r.TopKRatio)
	set(new(string), "", &p.UpdateInterval, r.UpdateInterval)
	if !(p.TopKRatio > 0 && p.TopKRatio < 1) {
		return fault.Inputf("--topk-ratio is %g: expected more than 0 and less than 1", p.TopKRatio)
	}
	if p.UpdateInterval < 1 || p.UpdateInterval > longestInterval {
		return fault.Inputf("--update-interval is %d: expected 1 to %d", p.UpdateInterval, longestInterval)
	}
	return nil
}

// mostLayers bounds --layers: the schedule looks at all pairs of layers.
const mostLayers = 4096

// pace adds the trainer to a job. clip is the flag; it is nil if the user has not given it.
func (j *Job) pace(r PaceRequest, clip *float64) (err error) {
	if j.Pace, err = r.resolve(); err != nil || j.Pace == nil {
		return err
	}
	if j.ScalesLoss() {
		return fault.Inputf("--overlap is given, but gradients are fp16: the rehearsal of a loss scale skips steps").
			WithHint("--precision bf16 takes the same time")
	}
	if j.Pace.Mode != overlap.Backward {
		return nil
	}
	unretractable := j.Format.Retractable()
	switch {
	case j.Clip == 0 && j.Pace.ClippedPercent > 0:
		return fault.Inputf("--clipped-percent is %g, but --clip is 0: nothing is clipped", j.Pace.ClippedPercent).
			WithHint("--clip 1")
	case j.Clip == 0:
		return nil
	case unretractable == nil:
		j.Pace.Speculates = true
		return nil
	case clip != nil || j.Recipe != nil || j.Pace.ClippedPercent > 0:
		return fault.Inputf("--overlap backward updates layers before the norm of all gradients is known, and the "+
			"norm is limited to %g: a step that turns out to be clipped would have to be retracted, and %v", j.Clip,
			unretractable).WithHint("--clip 0 turns clipping off; --overlap forward clips")
	}
	j.Clip = 0
	j.Notes = append(j.Notes, fmt.Sprintf("gradients are not clipped: --overlap backward updates layers before the "+
		"norm is known, and cannot retract them: %v", unretractable))
	return nil
}

// LayerCount returns the number of layers of the paced trainer.
func (p *Placement) LayerCount() int { return len(p.layers(p.Pace.Layers)) }

// HiddenFrom returns the tokens of a microbatch from which on the update is hidden on hosts like this one, if it takes
// that many seconds here and the trainer's time of a forward pass is proportional to the tokens. It returns 0 where
// the tokens of the pass are unknown, or the mode hides nothing.
func (p *Placement) HiddenFrom(updateSeconds float64) float64 {
	if p.Pace.Tokens == 0 {
		return 0
	}
	perParameter := float64(p.TrafficBytes()) / float64(p.Held)
	parameters := p.Model.Elements()
	return overlap.Rates{
		HostBytes: overlap.HostBytes(p.Format, perParameter), Bandwidth: float64(p.TrafficBytes()) / updateSeconds,
		FLOPS:      2 * float64(parameters) * float64(p.Pace.Tokens) / p.Pace.Forward.Seconds(),
		Parameters: parameters, Active: parameters, Hosts: max(1, p.WorldSize/p.Ranks),
		Backward: p.Pace.Backward.Seconds() / p.Pace.Forward.Seconds(),
	}.HiddenFrom(p.Pace.Mode)
}
