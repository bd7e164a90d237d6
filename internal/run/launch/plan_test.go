//go:build linux

package launch

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
)

// twoSockets returns a host with cores (0,6) to (2,8) on one socket and (3,9) to (5,11)
// on the other.
func twoSockets(t *testing.T) *host.Host {
	return hosttest.ReadText(t, "../../../examples/machines/two-socket.txtar").Discover(t)
}

func within(t *testing.T, h *host.Host, cpus string) *host.Host {
	t.Helper()
	mask, err := host.ParseList(cpus)
	if err != nil {
		t.Fatal(err)
	}
	narrowed, err := h.WithAffinity(mask)
	if err != nil {
		t.Fatal(err)
	}
	return narrowed
}

func TestPlanOfRanks(t *testing.T) {
	p, err := NewLaunch(twoSockets(t), Request{Command: []string{"python", "train.py"}, Ranks: 2,
		Binding: binding.Request{TrainerCores: binding.TrainerShare{Cores: 2}}},
		[]string{"OMP_NUM_THREADS=7", "HOME=/", "RANK=9"})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct{ cpus, optimizer, places, node string }{
		{"0-1,6-7", "2", "{0,6},{1,7}", "0"},
		{"3-4,9-10", "5", "{3,9},{4,10}", "1"},
	} {
		r, v := p.Ranks[i], strings.Join(p.Variables[i], " ")
		if r.CPUs.String() != want.cpus || r.Number != i || r.MemoryPolicy != binding.PolicyPreferred {
			t.Errorf("rank %d: %+v", i, r)
		}
		for _, variable := range []string{
			"PLIMSOLL_OPTIMIZER_CPUS=" + want.optimizer, "PLIMSOLL_NUMA_NODES=" + want.node,
			"OMP_PLACES=" + want.places, "OMP_PROC_BIND=false", "RANK=" + string('0'+rune(i)),
			"LOCAL_RANK=" + string('0'+rune(i)), "WORLD_SIZE=2", "PYTHONUNBUFFERED=1", "MASTER_ADDR=127.0.0.1",
		} {
			if !slices.Contains(p.Variables[i], variable) {
				t.Errorf("rank %d lacks %s: %s", i, variable, v)
			}
		}
		if strings.Contains(v, "OMP_NUM_THREADS") || !slices.Contains(r.Environment, "OMP_NUM_THREADS=7") {
			t.Errorf("rank %d: a variable that was set has changed: %s", i, v)
		}
	}
}

// TestPlaceOfALauncher takes one rank's share of the CPUs of all ranks on the host.
func TestPlaceOfALauncher(t *testing.T) {
	torchrun := []string{"RANK=3", "WORLD_SIZE=4", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2"}
	mpi := []string{"OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_RANK=1",
		"OMPI_COMM_WORLD_LOCAL_SIZE=2"}
	slurm := []string{"SLURM_STEP_ID=0", "SLURM_PROCID=1", "SLURM_LOCALID=1", "SLURM_NODEID=0", "SLURM_NTASKS=2",
		"SLURM_STEP_TASKS_PER_NODE=2", "SLURM_CPU_BIND_TYPE=mask_cpu:"}
	whole := twoSockets(t)
	for name, c := range map[string]struct {
		host        *host.Host
		environment []string
		cpus, note  string
	}{
		"torchrun binds nobody":   {whole, torchrun, "3-5,9-11", ""},
		"torchrun within taskset": {within(t, whole, "0-1,6-7"), torchrun, "1,7", ""},
		"Open MPI has bound it":   {within(t, whole, "1,7"), mpi, "1,7", "Open MPI has bound this rank to CPUs 1,7"},
		"Open MPI has not":        {whole, mpi, "3-5,9-11", ""},
		"Slurm, half cores":       {within(t, whole, "7-8"), append(slurm, "SLURM_CPU_BIND_LIST=0x43,0x180"), "8", ""},
		"Slurm, masks that overlap": {within(t, whole, "0-1,6-7"),
			append(slurm, "SLURM_CPU_BIND_LIST=0xC3,0xC3"), "1,7", ""},
		"bound anew since Slurm has bound it": {within(t, whole, "4,10"),
			append(slurm, "SLURM_CPU_BIND_LIST=0xC3,0xC3"), "4,10", "bound it since"},
	} {
		p, err := NewLaunch(c.host, Request{Command: []string{"python"},
			Binding: binding.Request{TrainerCores: binding.WholeTrainerShare}}, c.environment)
		if err != nil {
			t.Fatal(err)
		}
		notes := strings.Join(p.Notes, "\n")
		if len(p.Ranks) != 1 || p.Ranks[0].CPUs.String() != c.cpus || p.Ranks[0].Number != p.Placement.Rank ||
			(c.note == "") != (notes == "") || !strings.Contains(notes, c.note) {
			t.Errorf("%s: %+v, notes %q", name, p.Ranks[0].CPUs, notes)
		}
	}
}

// TestOnlyProcessOfAJob starts ranks in a process that a launcher (srun -n1 or similar)
// started for that.
func TestOnlyProcessOfAJob(t *testing.T) {
	p, err := NewLaunch(twoSockets(t), Request{Command: []string{"python"}, Ranks: 2,
		Binding: binding.Request{TrainerCores: binding.WholeTrainerShare}},
		[]string{"RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"})
	if err != nil || p.Placement != nil || len(p.Ranks) != 2 || !slices.Contains(p.Variables[1], "RANK=1") {
		t.Errorf("%+v, %v", p, err)
	}
}

// gpuUUIDs are the UUIDs that the driver gives the GPUs of twoSockets.
var gpuUUIDs = []string{"GPU-8a56a4bc-0000-4000-8000-000000000001", "GPU-8a99b1e2-0000-4000-8000-000000000002"}

// withDriver returns twoSockets with the driver's files. The divided GPUs have
// instances.
func withDriver(t *testing.T, divided ...int) *host.Host {
	t.Helper()
	m := hosttest.ReadText(t, "../../../examples/machines/two-socket.txtar")
	for i, address := range []string{"0000:17:00.0", "0000:b1:00.0"} {
		m.Files.Set("proc/driver/nvidia/gpus/"+address+"/information",
			fmt.Appendf(nil, "Model: \t\t NVIDIA L40\nGPU UUID: \t %s\nBus Location: \t %s\nDevice Minor: \t %d\n",
				gpuUUIDs[i], address, i))
	}
	for _, minor := range divided {
		m.Files.Set(fmt.Sprintf("proc/driver/nvidia/capabilities/gpu%d/mig/gi1/access", minor), nil)
	}
	return m.Discover(t)
}

// TestVisibleGPUs checks that the variables that hide and reorder GPUs decide which
// rank has which GPU.
func TestVisibleGPUs(t *testing.T) {
	const first, second = "0000:17:00.0", "0000:b1:00.0"
	for _, c := range []struct {
		variables string
		divided   []int
		gpus      []string // the GPUs of two ranks; nil if unknown
		note      string
	}{
		{"HOME=/", nil, []string{first, second}, ""},
		{"CUDA_VISIBLE_DEVICES=0,1", nil, []string{first, second}, ""},
		{"CUDA_VISIBLE_DEVICES=1,0", nil, []string{second, first}, ""},
		{"CUDA_VISIBLE_DEVICES= 1 , 0", nil, []string{second, first}, ""},
		{"CUDA_VISIBLE_DEVICES=" + gpuUUIDs[1] + "," + gpuUUIDs[0], nil, []string{second, first}, ""},
		{"CUDA_VISIBLE_DEVICES=GPU-8a99,gpu-8A56", nil, []string{second, first}, ""},
		{"CUDA_VISIBLE_DEVICES=GPU-8a9,1", nil, []string{second, second}, ""}, // CUDA refuses this
		{"CUDA_VISIBLE_DEVICES=GPU-8a,0", nil, nil, `"GPU-8a" matches 2 GPUs`},
		{"CUDA_VISIBLE_DEVICES=GPU-ff,0", nil, nil, `"GPU-ff" matches 0 GPUs`},
		{"CUDA_VISIBLE_DEVICES=MIG-" + gpuUUIDs[1] + "/1/0,MIG-" + gpuUUIDs[0] + "/2/0", nil,
			[]string{second, first}, ""},
		{"CUDA_VISIBLE_DEVICES=MIG-1c2d,MIG-3e4f", []int{1}, []string{second, second}, ""},
		{"CUDA_VISIBLE_DEVICES=MIG-1c2d,MIG-3e4f", []int{0, 1}, nil, `"MIG-1c2d" matches 2 GPUs`},
		{"CUDA_VISIBLE_DEVICES=", nil, []string{"", ""}, ""},
		{"CUDA_VISIBLE_DEVICES=NoDevFiles", nil, []string{"", ""}, ""},
		{"CUDA_VISIBLE_DEVICES=-1,0", nil, []string{"", ""}, ""},
		{"CUDA_VISIBLE_DEVICES=1,7", nil, nil, "several ranks name the same GPU"},
		{"CUDA_VISIBLE_DEVICES=x", nil, nil, `"x" matches 0 GPUs`},
		{"ROCR_VISIBLE_DEVICES=1,0", nil, []string{first, second}, ""}, // selects among AMD's GPUs
	} {
		h := withDriver(t, c.divided...)
		p, err := NewLaunch(h, Request{Command: []string{"python"}, Ranks: 2,
			Binding: binding.Request{TrainerCores: binding.WholeTrainerShare}}, []string{c.variables})
		if err != nil {
			t.Errorf("%s: %v", c.variables, err)
			continue
		}
		for i, bound := range p.Bound {
			reasons := strings.Join(bound.Reasons, "\n")
			_, after, found := strings.Cut(reasons, "near GPU ")
			gpu, _, _ := strings.Cut(after, "\n")
			want := ""
			if c.gpus != nil {
				want = c.gpus[i]
			}
			if gpu != want || found != (want != "") {
				t.Errorf("%s: rank %d is near GPU %q, want %q", c.variables, i, gpu, want)
			}
		}
		if notes := strings.Join(p.Notes, "\n"); (c.note == "") != (notes == "") || !strings.Contains(notes, c.note) {
			t.Errorf("%s: notes %q, want %q", c.variables, notes, c.note)
		}
	}
}

// TestVisibleGPUsOfPeers checks ranks of another launcher, each of which may see
// another GPU.
func TestVisibleGPUsOfPeers(t *testing.T) {
	rank := []string{"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2"}
	for name, c := range map[string]struct {
		values []string // of all ranks; nil if they cannot be found
		near   string
		note   string
	}{
		"one each":                 {[]string{"1", "0"}, "0000:17:00.0", ""},
		"all see all":              {[]string{"1,0", "1,0"}, "0000:17:00.0", ""},
		"numbered from 0 for each": {[]string{"0", "0"}, "", "several ranks name the same GPU"},
		"nobody is found":          {nil, "", "cannot find out which GPUs"},
	} {
		h := withDriver(t)
		request := Request{Command: []string{"python"},
			Binding: binding.Request{TrainerCores: binding.WholeTrainerShare}}
		request.Peers = func(*Placement, Environment) (peers []Peer) {
			for _, value := range c.values {
				peers = append(peers, Peer{h.CPUs, variables{"CUDA_VISIBLE_DEVICES": value}.lookup})
			}
			return peers
		}
		own := "0"
		if c.values != nil {
			own = c.values[1]
		}
		p, err := NewLaunch(h, request, append(rank, "CUDA_VISIBLE_DEVICES="+own))
		if err != nil {
			t.Fatal(err)
		}
		_, near, _ := strings.Cut(strings.Join(p.Bound[0].Reasons, "\n"), "near GPU ")
		near, _, _ = strings.Cut(near, "\n")
		if notes := strings.Join(p.Notes, "\n"); near != c.near || (c.note == "") != (notes == "") ||
			!strings.Contains(notes, c.note) {
			t.Errorf("%s: near %q, notes %q", name, near, notes)
		}
	}
}

// TestNumbersOfSlurm checks that a step confined to some GPUs numbers those from 0.
func TestNumbersOfSlurm(t *testing.T) {
	for value, c := range map[string]struct {
		step string
		want string // addresses, or the reason for none
	}{
		"0": {"1", "0000:b1:00.0"}, "1": {"1", "0000:b1:00.0"}, "0,1": {"0,1", "0000:17:00.0 0000:b1:00.0"},
	} {
		seen := visibleGPUs(withDriver(t), variables{"CUDA_VISIBLE_DEVICES": value, "SLURM_STEP_GPUS": c.step}.lookup)
		got := []string{}
		for _, gpu := range seen.gpus {
			got = append(got, gpu.Address)
		}
		if strings.Join(got, " ") != c.want || seen.why != "" {
			t.Errorf("%s of step %s: %v, %s", value, c.step, got, seen.why)
		}
	}
	three := gpusOf(withDriver(t), nvidia)
	three = append(three, three[0])
	v := visible{gpus: three}
	v.choose("1", variables{"SLURM_STEP_GPUS": "1,2"}.lookup)
	if !strings.Contains(v.why, "nor numbers from 0") {
		t.Errorf("GPU 1 of a step with two of three: %+v", v)
	}
}

// TestSharedCoresAreSaid checks the note on ranks that take turns on a core. They are
// slow, and give no hint of it themselves.
func TestSharedCoresAreSaid(t *testing.T) {
	half := binding.Request{TrainerCores: binding.DefaultTrainerShare}
	whole := binding.Request{TrainerCores: binding.WholeTrainerShare}
	for name, c := range map[string]struct {
		cpus    string
		ranks   int
		binding binding.Request
		says    string
	}{
		"enough":      {"0-5", 2, whole, ""},
		"fewer cores": {"0-1", 3, whole, "take turns on a core: 2 usable cores for 3 ranks of this host"},
		"one core":    {"0", 2, whole, "ranks 0-1 take turns on a core: 1 usable core for 2 ranks"},
		"one core of two roles": {"0", 1, half, "rank 0 has one core for the program and the optimizer, which " +
			"take turns on it"},
	} {
		p, err := NewLaunch(within(t, twoSockets(t), c.cpus), Request{Command: []string{"python"}, Ranks: c.ranks,
			Binding: c.binding}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if notes := strings.Join(p.Notes, "\n"); (c.says == "") != (notes == "") || !strings.Contains(notes, c.says) {
			t.Errorf("%s: notes %q, want %q", name, notes, c.says)
		}
	}
}

// TestThreadsOfTorchrun checks that OMP_NUM_THREADS=1 is replaced if torchrun set it.
// torchrun does so if the user set no value, and users of bound cores want more.
func TestThreadsOfTorchrun(t *testing.T) {
	rank := []string{"RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2"}
	for name, c := range map[string]struct {
		environment []string
		launcher    map[string]string // the launcher's environment; nil if unknown
		set, says   string
	}{
		"torchrun's own": {append(rank, "OMP_NUM_THREADS=1"), map[string]string{}, "OMP_NUM_THREADS=3",
			"torchrun has set OMP_NUM_THREADS to 1"},
		"the user's": {append(rank, "OMP_NUM_THREADS=1"), map[string]string{"OMP_NUM_THREADS": "1"}, "",
			"OMP_NUM_THREADS stays 1"},
		"not known whose": {append(rank, "OMP_NUM_THREADS=1"), nil, "", "OMP_NUM_THREADS stays 1"},
		"another number": {append(rank, "OMP_NUM_THREADS=2"), map[string]string{}, "",
			"OMP_NUM_THREADS stays 2, as it was set, although a rank has 3 cores"},
		"none":                {rank, map[string]string{}, "OMP_NUM_THREADS=3", ""},
		"the number of cores": {append(rank, "OMP_NUM_THREADS=3"), map[string]string{}, "", ""},
		"without another launcher": {[]string{"OMP_NUM_THREADS=64"}, nil, "",
			"OMP_NUM_THREADS stays 64, as it was set, although a rank has 6 cores"},
	} {
		request := Request{Command: []string{"python"},
			Binding: binding.Request{TrainerCores: binding.WholeTrainerShare}}
		request.LauncherVariable = func(_ *Placement, name string, _ Environment) (string, bool) {
			return c.launcher[name], c.launcher != nil
		}
		p, err := NewLaunch(twoSockets(t), request, c.environment)
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(p.Variables[0], func(v string) bool { return strings.HasPrefix(v, "OMP_NUM_THREADS=") })
		got := ""
		if i >= 0 {
			got = p.Variables[0][i]
		}
		if notes := strings.Join(p.Notes, "\n"); got != c.set || (c.says == "") != (notes == "") ||
			!strings.Contains(notes, c.says) {
			t.Errorf("%s: set %q, notes %q", name, got, notes)
		}
	}
	inner, err := NewLaunch(twoSockets(t), Request{Command: []string{"torchrun", "train.py"},
		Binding: binding.Request{TrainerCores: binding.WholeTrainerShare}}, nil)
	if err != nil || !strings.Contains(strings.Join(inner.Notes, "\n"), "OMP_NUM_THREADS=1") {
		t.Errorf("torchrun within: notes %q, %v", inner.Notes, err)
	}
}

func TestRefusals(t *testing.T) {
	command := []string{"python"}
	// The last of four ranks, each of which got CPUs of its own from mpirun.
	bound := []string{"OMPI_COMM_WORLD_RANK=3", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_RANK=3",
		"OMPI_COMM_WORLD_LOCAL_SIZE=4"}
	whole := binding.Request{TrainerCores: binding.WholeTrainerShare}
	reserving := whole
	reserving.Reserve = 1
	fewGPUs := whole
	fewGPUs.GPUs = []string{"0000:17:00.0", "0000:b1:00.0"}
	for name, c := range map[string]struct {
		request     Request
		environment []string
		says        string
	}{
		"no command":    {Request{Binding: whole}, nil, "no command"},
		"ranks below 0": {Request{Command: command, Ranks: -1, Binding: whole}, nil, "--nproc is -1"},
		"two who start ranks": {Request{Command: command, Ranks: 2, Binding: whole},
			[]string{"RANK=0", "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1"}, "torchrun has started"},
		"torchrun within": {Request{Command: []string{"/usr/bin/torchrun"}, Ranks: 2, Binding: whole},
			nil, "torchrun starts ranks itself"},
		"python -m torchrun within": {Request{Command: []string{"python", "-m", "torch.distributed.run"},
			Ranks: 2, Binding: whole}, nil, "torch.distributed.run starts ranks itself"},
		"a port that is none": {Request{Command: command, Binding: whole}, []string{"MASTER_PORT=http"},
			`MASTER_PORT is "http"`},
		"a port that ranks cannot know": {Request{Command: command, Binding: whole}, []string{"MASTER_PORT=0"},
			`MASTER_PORT is "0"`},
		"no core for the program": {Request{Command: command}, nil, "--trainer-cores 0 leaves no CPU"},
		"cores of ranks that others bound": {Request{Command: command, Binding: reserving}, bound,
			"Open MPI has bound the ranks"},
		"fewer GPUs than ranks": {Request{Command: command, Binding: fewGPUs}, bound, "2 GPUs for 1 rank"},
	} {
		if _, err := NewLaunch(within(t, twoSockets(t), "0-4"), c.request, c.environment); err == nil ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %v, want %q", name, err, c.says)
		}
	}
}

func TestInnerLaunchers(t *testing.T) {
	for command, want := range map[string]string{
		"torchrun train.py": "torchrun", "python train.py torchrun": "",
		"python -m torch.distributed.run train.py": "torch.distributed.run",
		"python /usr/bin/torchrun --nproc 2":       "torchrun", "/opt/bin/deepspeed x.py": "deepspeed",
		"python -u train.py": "", "sh -c torchrun": "torchrun",
	} {
		if got := innerLauncher(strings.Fields(command)); got != want {
			t.Errorf("%s: %q, want %q", command, got, want)
		}
	}
}

func TestMemoryOfNumaMaps(t *testing.T) {
	memory := map[int]ledger.Bytes{}
	addMemory(strings.NewReader(`55d0c8a00000 default file=/usr/bin/python3.11 mapped=400 N0=400 kernelpagesize_kB=4
7f2c4e000000 prefer:0 anon=512 dirty=512 N0=500 N1=12 kernelpagesize_kB=4
7f2c4f000000 prefer:0 file=/memfd:plimsoll/rank0/exp_avg\040(deleted) huge dirty=3 N1=3 kernelpagesize_kB=2048
7ffd00000000 default stack anon=4 dirty=4 N0=4 kernelpagesize_kB=4
7ffd00001000 default
`), memory)
	if want := 504 * 4 * ledger.KiB; memory[0] != want || memory[1] != 48*ledger.KiB+6*ledger.MiB {
		t.Errorf("%v", memory)
	}
}

func TestStatFields(t *testing.T) {
	const stat = "42 (a) b) (c) S 7 42 42 0 -1"
	if parent, group := statField(stat, parentField), statField(stat, groupField); parent != 7 || group != 42 {
		t.Errorf("parent %d, group %d", parent, group)
	}
	if statField("42 (x", groupField) != -1 {
		t.Error("a broken line has a group")
	}
}
