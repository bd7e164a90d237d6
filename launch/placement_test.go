package launch

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/cpuset"

	"plimsoll/fault"
)

// variables is an environment.
type variables map[string]string

func (v variables) lookup(name string) (string, bool) {
	value, set := v[name]
	return value, set
}

// slurmTask is the environment of a task of srun as Slurm 22.05 sets it.
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
	slurm := Placement{Launcher: "Slurm", Rank: 5, WorldSize: 8, LocalRank: 1, LocalWorldSize: 2, Masks: masks, MasterAddress: "node08", MasterPort: portFor("6.0")}
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
			variables{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
			&Placement{Launcher: "Open MPI", Rank: 3, WorldSize: 4, LocalRank: 1, LocalWorldSize: 2, Bound: true},
		},
		// Helpers of mpirun are tasks of srun, and its ranks inherit what they have.
		"Open MPI within Slurm": {
			slurmTask(variables{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}),
			&Placement{Launcher: "Open MPI", Rank: 3, WorldSize: 8, LocalRank: 1, LocalWorldSize: 4, Bound: true},
		},
		"Slurm, with variables of a script": {slurmTask(variables{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}), &slurm},
		"DeepSpeed":                         {variables{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}, &Placement{Launcher: "DeepSpeed", Rank: 1, WorldSize: 2, LocalRank: 1, LocalWorldSize: 2}},
		"a pod":                             {variables{"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0"}, &Placement{Launcher: "Kubernetes", Rank: 2, WorldSize: 3, LocalWorldSize: 1}},
		"a rank without a local one":        {variables{"RANK": "3"}, nil},
	} {
		got, err := FindPlacement(c.environment.lookup)
		if diff := cmp.Diff(c.want, got, cmp.Comparer(cpuset.CPUSet.Equals)); err != nil || diff != "" {
			t.Errorf("%s: %v %s", name, err, diff)
		}
	}
}

func TestBrokenPlacementIsNamed(t *testing.T) {
	for name, value := range map[string]string{
		"SLURM_PROCID": "8", "SLURM_NTASKS": "many", "SLURM_LOCALID": "2", "SLURM_NODEID": "-1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
		"SLURM_CPU_BIND_LIST": "0xg", "SLURM_STEP_NODELIST": "node[",
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
		"vm": "vm", "a,b": "a", "node[03-07,12],gpu1": "node03", "gpu1,node[1-2]": "gpu1", "r[1-2]n[05-06]": "r1n05", "rack[7]-x,y": "rack7-x",
		"": "!", "[": "!", "node[]": "!", "node[x]": "!", "node[1": "!", "node[1]n[": "!",
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
