package plan

import (
	"cmp"
	"errors"
	"slices"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/plan/allocator"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/simulate"
)

// NewMegatron plans a job of Megatron-LM with an allocator of PyTorch. The plan has a device for the GPUs of each
// pipeline stage, and one for the memory of a node with ranks of the stage that holds most on the host.
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
func LastStage(j *megatron.Job, c allocator.Configuration) (ledger.Device, Spread, error) {
	devices, err := megatronStages(j, c, []int64{j.Degrees.Pipeline - 1})
	if err != nil {
		return ledger.Device{}, Spread{}, err
	}
	return devices[0], spreadOfMegatron(j), nil
}

func megatronStages(j *megatron.Job, c allocator.Configuration, stages []int64) ([]ledger.Device, error) {
	var devices []ledger.Device
	var hosts []simulate.Memory
	for _, stage := range stages {
		memory, host, err := simulate.RunMegatron(j, stage, c, j.GPU.Memory)
		var full *allocator.OutOfMemory
		if errors.As(err, &full) {
			memory, host, err = simulate.RunMegatron(j, stage, c, 0)
		}
		if err != nil {
			return nil, err
		}
		d := ledger.Device{Kind: ledger.GPU, Name: j.GPU.Name,
			Rank:  int(stage * j.Degrees.World() / j.Degrees.Pipeline),
			Count: int(j.Degrees.World() / j.Degrees.Pipeline), Capacity: j.GPU.Memory,
			Outside: memory.Outside, Phases: memory.Phases}
		addOutside(&d)
		devices, hosts = append(devices, d), append(hosts, host)
	}
	fullest := slices.MaxFunc(hosts, func(a, b simulate.Memory) int { return cmp.Compare(peakOf(a), peakOf(b)) })
	devices = append(devices, megatronNode(j, fullest))
	spreadOfMegatron(j).setIntervals(devices)
	setOrigins(devices, originsOfMegatron(j))
	return devices, nil
}

func peakOf(m simulate.Memory) ledger.Bytes {
	var peak ledger.Bytes
	for _, p := range m.Phases {
		peak = max(peak, p.PeakReserved)
	}
	return peak
}

// megatronNode returns the host memory of a node whose ranks are all of one stage.
func megatronNode(j *megatron.Job, m simulate.Memory) ledger.Device {
	class := simulate.RankClass{Ranks: int(j.Degrees.World()), RanksPerNode: int(j.RanksPerNode), Host: m}
	return nodeOf(&job.Job{Machine: job.Machine{HostMemory: j.HostMemory}}, class)
}
