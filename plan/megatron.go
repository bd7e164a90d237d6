package plan

import (
	"errors"

	"plimsoll/allocator"
	"plimsoll/ledger"
	"plimsoll/megatron"
	"plimsoll/simulate"
)

// NewMegatron plans a job of Megatron-LM with an allocator of PyTorch. The plan has a device for the GPUs of each
// pipeline stage.
func NewMegatron(j *megatron.Job, c allocator.Configuration) ([]ledger.Device, Verdict, error) {
	stages := make([]int64, j.Degrees.Pipeline)
	for i := range stages {
		stages[i] = int64(i)
	}
	devices, err := megatronStages(j, c, stages)
	if err != nil {
		return nil, Verdict{}, err
	}
	whole := Plan{Devices: devices}
	whole.judge()
	return devices, whole.Verdict, nil
}

// LastStage plans the last pipeline stage only.
func LastStage(j *megatron.Job, c allocator.Configuration) (ledger.Device, error) {
	devices, err := megatronStages(j, c, []int64{j.Degrees.Pipeline - 1})
	if err != nil {
		return ledger.Device{}, err
	}
	return devices[0], nil
}

func megatronStages(j *megatron.Job, c allocator.Configuration, stages []int64) ([]ledger.Device, error) {
	var devices []ledger.Device
	for _, stage := range stages {
		memory, err := simulate.RunMegatron(j, stage, c, j.GPU.Memory)
		var full *allocator.OutOfMemory
		if errors.As(err, &full) {
			memory, err = simulate.RunMegatron(j, stage, c, 0)
		}
		if err != nil {
			return nil, err
		}
		d := ledger.Device{Kind: ledger.GPU, Name: j.GPU.Name,
			Rank:  int(stage * j.Degrees.World() / j.Degrees.Pipeline),
			Count: int(j.Degrees.World() / j.Degrees.Pipeline), Capacity: j.GPU.Memory,
			Outside: memory.Outside, Phases: memory.Phases}
		addOutside(&d)
		devices = append(devices, d)
	}
	return devices, nil
}
