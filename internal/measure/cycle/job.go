//go:build linux

// Package cycle moves the states of an optimizer as plimsoll.torch.StateOffload does: from the host to a device, where
// they are updated, and back. No device is needed. Host memory stands in for that of the device, and a stated time for
// the update. Copies are real, and no faster than the stated link.
package cycle

import (
	"cmp"
	"slices"
	"time"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/measure/rehearse"
	"plimsoll/internal/plan/roads"
	"plimsoll/internal/state/optim/kernel"
)

// The modes of plimsoll.torch.StateOffload.
const (
	Chunked = "chunked" // the device has two slots, for a chunk each
	Whole   = "whole"   // all states come to the device, and are updated together
)

// Modes returns the names of the modes.
func Modes() []string { return []string{Chunked, Whole} }

// Muon is the name of the optimizer that updates matrices by their orthogonalized momentum, and all else by AdamW.
const Muon = "muon"

// Request is a rehearsal as a user asks for it. Empty fields take the default.
type Request struct {
	rehearse.Request
	Mode string
	// LinkIn and LinkOut are the speeds of the copies to the device and back, in GB/s. 0 is the speed of this host's
	// memory.
	LinkIn, LinkOut    float64
	UpdateMilliseconds float64 // of all parameters on the device; 0 for what the law says of an H100
	ChunkBytes         ledger.Bytes
	NoRecovery         bool
}

// Job is a rehearsal with everything decided except the host.
type Job struct {
	*rehearse.Job
	Muon              bool
	Link              roads.Link    // 0 for the speed of this host's memory
	Update            time.Duration // 0 for what the law says
	Forward, Backward time.Duration
	Settings          roads.Settings
}

// fastestLink bounds the stated speeds, in GB/s.
const fastestLink = 1e5

// Resolve reads the files of the request and decides every open choice. Every error is about the request.
func (r Request) Resolve() (*Job, error) {
	j := &Job{Muon: r.Optimizer == Muon, Settings: roads.Settings{Whole: r.Mode == Whole,
		ChunkBytes: cmp.Or(r.ChunkBytes, roads.DefaultChunk), Fraction: 1, Recovery: !r.NoRecovery}}
	if err := r.checkPace(); err != nil {
		return nil, err
	}
	if r.Mode != "" && !slices.Contains(Modes(), r.Mode) {
		return nil, fault.Inputf("--offload-mode is %v", fault.Unknown(r.Mode, Modes()))
	}
	var err error
	if j.Forward, j.Backward, err = r.Pace.Passes(); err != nil {
		return nil, err
	}
	if r.UpdateMilliseconds != 0 {
		if j.Update, err = rehearse.Milliseconds("--update-ms", r.UpdateMilliseconds); err != nil {
			return nil, err
		}
	}
	for _, speed := range []struct {
		flag  string
		value float64
		to    *float64
	}{{"--link-in", r.LinkIn, &j.Link.In}, {"--link-out", r.LinkOut, &j.Link.Out}} {
		if !(speed.value >= 0 && speed.value <= fastestLink) {
			return nil, fault.Inputf("%s is %g: expected a speed in GB/s, more than 0 and at most %g", speed.flag,
				speed.value, fastestLink).WithHint("leave it out for the speed of this host's memory")
		}
		*speed.to = speed.value * 1e9
	}
	inner := r.Request
	inner.Pace = rehearse.PaceRequest{}
	if j.Muon {
		inner.Optimizer = "adamw"
	}
	if j.Job, err = inner.Resolve(); err != nil {
		return nil, err
	}
	return j, j.check()
}

// checkPace refuses what belongs to the update by the CPU.
func (r Request) checkPace() error {
	p := r.Pace
	switch {
	case p.Mode != "":
		return fault.Inputf("--overlap and --offload states are both given: --overlap is how an update by the CPU " +
			"hides, but with --offload states the device updates").
			WithHint("leave --overlap out: with --forward-ms the result shows what either road hides")
	case p.TopKRatio != nil || p.UpdateInterval != nil:
		return fault.Inputf("--topk-ratio and --update-interval are for an update by the CPU, but with --offload " +
			"states the device updates").WithHint("leave them out")
	case p.Layers != 0 || p.Tokens != 0:
		return fault.Inputf("--layers and --tokens are for --overlap, but --offload states has no layers: " +
			"the forward pass begins when all is updated").WithHint("leave them out")
	}
	return nil
}

// check refuses states that plimsoll.torch.StateOffload does not have.
func (j *Job) check() error {
	switch {
	case j.Format.State == kernel.Split24:
		return fault.Inputf("--state split24 is a format of the update by the CPU, which rounds at random: the " +
			"device updates fp32 master weights").WithHint("--state split")
	case j.Format.Moments == kernel.MomentsInt8:
		return fault.Inputf("--moments int8 is a format of the update by the CPU: the device updates moments in fp32 " +
			"or bf16").WithHint("--moments bf16")
	case j.ScalesLoss():
		return fault.Inputf("--offload states is given, but gradients are fp16: the rehearsal of a loss scale skips " +
			"steps").WithHint("--precision bf16 takes the same time")
	case j.Muon && j.WorldSize > 1:
		return fault.Inputf("--optimizer muon is rehearsed for one rank, but --world-size is %d: "+
			"every matrix has one rank as its owner", j.WorldSize).WithHint("leave --ranks and --world-size out")
	}
	return nil
}

// OptimizerName returns the name of the optimizer.
func (j *Job) OptimizerName() string {
	if j.Muon {
		return "Muon, " + j.Optimizer.String() + " for embeddings, head and vectors"
	}
	return j.Optimizer.String()
}

// Mode returns the name of the mode.
func (j *Job) Mode() string {
	if j.Settings.Whole {
		return Whole
	}
	return Chunked
}

// masterBytes returns the bytes of an element of the master weights that move.
func (j *Job) masterBytes() int64 {
	switch {
	case j.Format.Parameter == dtype.F32: // the parameter is its own master
		return 0
	case j.Format.State == kernel.Split:
		return dtype.BF16.Size()
	}
	return dtype.F32.Size()
}
