package plan

import (
	"fmt"

	"plimsoll/dtype"
	"plimsoll/engine"
	"plimsoll/job"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
	"plimsoll/shard"
)

// StateFormat is the memory of a node that Plimsoll takes for the optimizer state in
// one of its formats.
type StateFormat struct {
	State             string       `json:"state"`
	Moments           string       `json:"moments"`
	Bytes             ledger.Bytes `json:"bytes"`
	BytesPerParameter float64      `json:"bytes_per_parameter"`
	Why               string       `json:"why"`
}

// stateFormats returns the size of the state in Plimsoll's formats, nil for optimizers
// that they do not hold. It is the size of all arenas that a shard maps, those of
// gradients and 16-bit parameters included.
func stateFormats(j *job.Job, trained int64) []StateFormat {
	var list []StateFormat
	each := (trained + int64(j.World) - 1) / int64(j.World)
	if each == 0 || !kernelAdam(j.Optimizer.Name) {
		return nil
	}
	for _, f := range []kernel.Format{
		{State: kernel.Split, Moments: kernel.MomentsFP32, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.Split, Moments: kernel.MomentsBF16, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.Split, Moments: kernel.MomentsInt8, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.FP32, Moments: kernel.MomentsFP32, Parameter: dtype.BF16, Gradient: dtype.F32},
	} {
		f.Algorithm = kernel.Adam
		layout, err := shard.NewLayout(f, shard.DefaultChunk, shard.Uniform(f, each))
		if err != nil {
			return nil // more than one shard can have
		}
		var bytes ledger.Bytes
		for _, arena := range (engine.ShardConfig{Layout: layout}).Arenas() {
			bytes += arena.Size
		}
		list = append(list, StateFormat{
			State: f.State.String(), Moments: f.Moments.String(), Bytes: bytes * ledger.Bytes(j.RanksPerNode),
			BytesPerParameter: float64(bytes) / float64(each),
			Why: fmt.Sprintf("%d ranks x %s parameters, everything included; plimsoll rehearse measures it",
				j.RanksPerNode, ledger.Count(each)),
		})
	}
	return list
}

// kernelAdam reports whether the optimizer is a variant of Adam, whose states the
// formats hold.
func kernelAdam(name string) bool { return name == "adamw" || name == "adam" || name == "adamw-apex" }
