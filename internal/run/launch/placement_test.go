//go:build linux

package launch

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
)

// variables is an environment.
type variables map[string]string

func (v variables) lookup(name string) (string, bool) {
	value, set := v[name]
	return value, set
}

// slurmTask returns the environment of a task of srun as Slurm 22.05 sets it.
func slurmTask(more variables) variables {
	v := variables{
		"SLURM_JOB_ID": "6", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
		"SLURM_NTASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1(x2)", "SLURM_STEP_NODELIST": "node[08-10,12],gpu1",
		"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x13C,0xF200",
	}
	for name, value := range more {
		v[name] = value
		if value == "" {
			delete(v, name)
		}
	}
	return v
}

func TestPlacement(t *testing.T) {
	masks := []cpuset.CPUSet{cpuset.New(2, 3, 4, 5, 8), cpuset.New(9, 12, 13, 14, 15)}
	slurm := Placement{Launcher: "Slurm", Rank: 5, WorldSize: 8, LocalRank: 1, LocalWorldSize: 2, Masks: masks,
		MasterAddress: "node08", MasterPort: portFor("6.0")}
	noMasks := slurm
	noMasks.Masks = nil
	for name, c := range map[string]struct {
		environment variables
		want        *Placement
	}{
		"none":                       {variables{"HOME": "/"}, nil},
		"Slurm":                      {slurmTask(nil), &slurm},
		"Slurm, not bound":           {slurmTask(variables{"SLURM_CPU_BIND_TYPE": "none"}), &noMasks},
		"Slurm, masks of other size": {slurmTask(variables{"SLURM_CPU_BIND_LIST": "0x1"}), &noMasks},
		"a batch script is no rank":  {slurmTask(variables{"SLURM_STEP_ID": ""}), nil},
		"torchrun within Slurm": {
			slurmTask(variables{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
			&Placement{Launcher: "torchrun", Rank: 3, WorldSize: 4, LocalRank: 1, LocalWorldSize: 2},
		},
		"Open MPI on two hosts": {
			variables{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
				"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
			&Placement{Launcher: "Open MPI", Rank: 3, WorldSize: 4, LocalRank: 1, LocalWorldSize: 2, Bound: true},
		},
		// mpirun's helpers are tasks of srun, and its ranks inherit their variables.
		"Open MPI within Slurm": {
			slurmTask(variables{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8",
				"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}),
			&Placement{Launcher: "Open MPI", Rank: 3, WorldSize: 8, LocalRank: 1, LocalWorldSize: 4, Bound: true},
		},
		"Slurm, with variables of a script": {
			slurmTask(variables{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}), &slurm,
		},
		"DeepSpeed": {
			variables{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"},
			&Placement{Launcher: "DeepSpeed", Rank: 1, WorldSize: 2, LocalRank: 1, LocalWorldSize: 2},
		},
		// salloc with LaunchParameters=use_interactive_step: a step of one task, and a
		// larger number of tasks of the job.
		"Slurm's interactive step": {
			slurmTask(variables{"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
				"SLURM_NODEID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
				"SLURM_STEP_NODELIST": "node08", "SLURM_CPU_BIND_LIST": "0x3F3C"}),
			&Placement{Launcher: "Slurm", WorldSize: 1, LocalWorldSize: 1,
				Masks:         []cpuset.CPUSet{cpuset.New(2, 3, 4, 5, 8, 9, 10, 11, 12, 13)},
				MasterAddress: "node08", MasterPort: portFor("6.4294967290")},
		},
		"a step that is smaller than its job": {
			slurmTask(variables{"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "8"}), &slurm,
		},
		"PALS": {
			variables{"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PMI_RANK": "5",
				"PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"},
			&Placement{Launcher: "PALS", Rank: 5, WorldSize: 8, LocalRank: 1, LocalWorldSize: 4, Bound: true},
		},
		"Cray PMI": {
			variables{"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"},
			&Placement{Launcher: "MPI", Rank: 5, WorldSize: 8, LocalRank: 1, LocalWorldSize: 4, Bound: true},
		},
		"jsrun": {
			variables{"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8", "JSM_NAMESPACE_LOCAL_RANK": "1",
				"JSM_NAMESPACE_LOCAL_SIZE": "4"},
			&Placement{Launcher: "jsrun", Rank: 5, WorldSize: 8, LocalRank: 1, LocalWorldSize: 4, Bound: true},
		},
		"horovodrun": {
			variables{"HOROVOD_RANK": "5", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4"},
			&Placement{Launcher: "horovodrun", Rank: 5, WorldSize: 8, LocalRank: 1, LocalWorldSize: 4},
		},
		"Flux on one host": {
			variables{"FLUX_JOB_ID": "77", "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "3", "FLUX_JOB_SIZE": "4",
				"FLUX_JOB_NNODES": "1"},
			&Placement{Launcher: "Flux", Rank: 3, WorldSize: 4, LocalRank: 3, LocalWorldSize: 4,
				MasterAddress: "127.0.0.1", MasterPort: portFor("77")},
		},
		"Flux, a rank on each host": {
			variables{"FLUX_JOB_ID": "77", "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "4",
				"FLUX_JOB_NNODES": "4"},
			&Placement{Launcher: "Flux", Rank: 3, WorldSize: 4, LocalRank: 0, LocalWorldSize: 1,
				MasterPort: portFor("77")},
		},
		"Flux on two hosts, told how many ranks are here": {
			variables{"FLUX_JOB_ID": "77", "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_SIZE": "4",
				"FLUX_JOB_NNODES": "2", "LOCAL_WORLD_SIZE": "1"},
			&Placement{Launcher: "Flux", Rank: 3, WorldSize: 4, LocalRank: 0, LocalWorldSize: 1,
				MasterPort: portFor("77")},
		},
		"PMI of a step": {slurmTask(variables{"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1",
			"PMI_LOCAL_SIZE": "2", "PMIX_RANK": "5"}), &slurm},
		"PALS in Slurm's interactive step": {
			slurmTask(variables{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
				"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
				"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PMI_SIZE": "8"}),
			&Placement{Launcher: "PALS", Rank: 5, WorldSize: 8, LocalRank: 1, LocalWorldSize: 4, Bound: true},
		},
		"PMI of a job of one rank": {variables{"PMI_RANK": "0", "PMI_SIZE": "1"}, nil},
		"a pod": {variables{"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0"},
			&Placement{Launcher: "Kubernetes", Rank: 2, WorldSize: 3, LocalWorldSize: 1}},
		"a rank without a local one": {variables{"RANK": "3"}, nil},
	} {
		got, err := FindPlacement(c.environment.lookup)
		if diff := cmp.Diff(c.want, got, cmp.Comparer(cpuset.CPUSet.Equals)); err != nil || diff != "" {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
}

func TestBrokenPlacementIsNamed(t *testing.T) {
	for name, value := range map[string]string{
		"SLURM_PROCID": "8", "SLURM_NTASKS": "many", "SLURM_LOCALID": "2", "SLURM_NODEID": "-1",
		"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_CPU_BIND_LIST": "0xg", "SLURM_STEP_NODELIST": "node[",
	} {
		_, err := FindPlacement(slurmTask(variables{name: value}).lookup)
		if input, ok := err.(*fault.Input); !ok || !strings.Contains(input.Error(), name) && name != "SLURM_LOCALID" {
			t.Errorf("%s=%s: error %v", name, value, err)
		}
	}
}

func TestRanksOfAnUnknownHost(t *testing.T) {
	_, err := FindPlacement(variables{"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.lookup)
	if err == nil || !strings.Contains(err.Error(), "LOCAL_WORLD_SIZE is not set") {
		t.Errorf("got %v", err)
	}
}

// TestUnknownLaunchers checks that one of possibly many ranks does not start a job of
// its own.
func TestUnknownLaunchers(t *testing.T) {
	for name, c := range map[string]struct {
		environment variables
		says        string
	}{
		"PMI without a local rank": {variables{"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK is 1 and PMI_SIZE is 2"},
		"PMI without a size":       {variables{"PMI_RANK": "0"}, "PMI_RANK is 0"},
		"PMIx":                     {variables{"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-1"}, "PMIX_RANK is 0"},
		"aprun":                    {variables{"ALPS_APP_PE": "3"}, "ALPS_APP_PE is 3"},
		"PMI in an interactive step of Slurm": {
			variables{"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
				"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "PMI_RANK": "0", "PMI_SIZE": "2"},
			"PMI_RANK is 0 and PMI_SIZE is 2"},
		"PALS without a size": {variables{"PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"},
			"PMI_SIZE is not set"},
		"Flux on two hosts": {variables{"FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "4",
			"FLUX_JOB_NNODES": "2"},
			"Flux started 4 ranks on 2 hosts, and does not say how many are on this host"},
	} {
		_, err := FindPlacement(c.environment.lookup)
		var input *fault.Input
		if !errors.As(err, &input) || !strings.Contains(err.Error(), c.says) || input.Hint == "" {
			t.Errorf("%s: got %v, want %q", name, err, c.says)
		}
	}
}

func TestLists(t *testing.T) {
	for list, want := range map[string][]int{"3": {3}, "2(x3),1": {2, 2, 2, 1}, "1,2": {1, 2}} {
		for node, tasks := range want {
			if got, err := TasksOfNode(list, node); err != nil || got != tasks {
				t.Errorf("%s: node %d has %d tasks (%v), want %d", list, node, got, err, tasks)
			}
		}
		if _, err := TasksOfNode(list, len(want)); err == nil {
			t.Errorf("%s: there is a node %d", list, len(want))
		}
	}
	for list, want := range map[string]string{
		"vm": "vm", "a,b": "a", "node[03-07,12],gpu1": "node03", "gpu1,node[1-2]": "gpu1", "r[1-2]n[05-06]": "r1n05",
		"rack[7]-x,y": "rack7-x", "": "!", "[": "!", "node[]": "!", "node[x]": "!", "node[1": "!", "node[1]n[": "!",
	} {
		got, err := FirstHost(list)
		if err != nil {
			got = "!"
		}
		if got != want {
			t.Errorf("%q begins with %q (%v), want %q", list, got, err, want)
		}
	}
}

func FuzzFirstHost(f *testing.F) {
	for _, list := range []string{"node[03-07,12],gpu1", "a,b", "r[1-2]n[05-06]", "[", "]["} {
		f.Add(list)
	}
	f.Fuzz(func(t *testing.T, list string) {
		if name, err := FirstHost(list); err == nil && (name == "" || strings.ContainsAny(name, "[,")) {
			t.Errorf("%q begins with %q", list, name)
		}
	})
}

func FuzzTasksOfNode(f *testing.F) {
	f.Add("2(x3),1", 3)
	f.Add("99999999999999999999(x1)", 0)
	f.Fuzz(func(t *testing.T, list string, node int) {
		if tasks, err := TasksOfNode(list, node); err == nil && tasks < 1 {
			t.Errorf("%q: node %d has %d tasks", list, node, tasks)
		}
	})
}

func FuzzParseMasks(f *testing.F) {
	f.Add("0x13C,0xF200")
	f.Fuzz(func(t *testing.T, list string) {
		masks, err := ParseMasks(list)
		for _, mask := range masks {
			if err == nil && mask.IsEmpty() {
				t.Errorf("%q has an empty mask", list)
			}
		}
	})
}
