package host_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/machine/host/hosttest"
)

// recordedMachines is the folder of recorded machines.
const recordedMachines = "../../../examples/machines/"

var sameHost = cmp.Options{cmp.Comparer(cpuset.CPUSet.Equals), cmp.AllowUnexported(host.NUMANode{})}

// checkRecord writes the machine and reads it back.
func checkRecord(t *testing.T, m hosttest.Machine) []byte {
	t.Helper()
	data, err := host.Record(m.Files, m.Affinity)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "machine.txtar")
	if err := os.WriteFile(name, data, 0o644); err != nil {
		t.Fatal(err)
	}
	root, affinity, err := host.Root(name)
	if err != nil {
		t.Fatal(err)
	}
	back, err := host.Discover(root, affinity)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m.Discover(t), back, sameHost); diff != "" {
		t.Errorf("%s is read back as another: %s", m.Name, diff)
	}
	return data
}

func TestRecord(t *testing.T) {
	machines := hosttest.Corpus(t)
	largest := 0
	for _, m := range machines {
		data := checkRecord(t, m.Machine)
		largest = max(largest, len(data)*1000/m.Facts.PUs)
	}
	if largest > 2_500_000 {
		t.Errorf("up to %d bytes for 1000 CPUs", largest)
	}
	for _, s := range hosttest.Scenarios(t, machines) {
		checkRecord(t, s.Machine)
	}
	for _, overlay := range []string{"slurm", "container"} {
		checkRecord(t, hosttest.ReadText(t, recordedMachines+"two-socket.txtar", recordedMachines+overlay+".txtar"))
	}
	checkRecord(t, hosttest.ReadText(t, recordedMachines+"virtual-machine.txtar"))
}

// TestRecordIsNotPrivate puts secrets where real machines have them.
func TestRecordIsNotPrivate(t *testing.T) {
	m := hosttest.ReadText(t, recordedMachines+"two-socket.txtar", recordedMachines+"slurm.txtar")
	add := func(name, text string) {
		old, _ := m.Files.ReadFile(name)
		m.Files.Set(name, append(old, text...))
	}
	m.Files.Set("proc/sys/kernel/hostname", []byte("secret\n"))
	m.Files.Set("sys/bus/pci/devices/0000:17:00.0/serial", []byte("secret\n"))
	m.Files.Set("sys/class/dmi/id/product_serial", []byte("secret\n"))
	m.Files.Set("proc/self/cgroup", []byte("9:memory:/slurm_secret/uid_0/job_7\n"))
	m.Files.Set("sys/fs/cgroup/memory/slurm_secret/memory.limit_in_bytes", []byte("4096\n"))
	add("proc/cpuinfo", "Serial\t\t: secret\n")
	add("proc/self/status", "Name:\tsecret\n")
	add("proc/self/mountinfo", "99 23 8:1 / /media/secret rw - ext4 /dev/secret rw\n")
	data, err := host.Record(m.Files, m.Affinity)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, "secret") {
			t.Errorf("private: %s", line)
		}
	}
	if !strings.Contains(string(data), "-- sys/fs/cgroup/memory/slurm_HOST/memory.limit_in_bytes --\n4096\n") {
		t.Error("the limit of slurm_HOST is not there")
	}
}

// TestRootWithSpecialFiles uses a directory with special files in place of regular ones as a machine.
func TestRootWithSpecialFiles(t *testing.T) {
	m := hosttest.ReadText(t, recordedMachines+"virtual-machine.txtar")
	for kind, make := range filestest.Special {
		directory := t.TempDir()
		for _, name := range []string{
			"proc/cpuinfo", "proc/meminfo", "proc/self/cgroup", "proc/self/mountinfo", "sys/devices/system/node",
			"sys/bus",
		} {
			path := filepath.Join(directory, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), make(path)); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(directory, "affinity"), []byte(m.Affinity.String()), 0o600); err != nil {
			t.Fatal(err)
		}
		root, affinity, err := host.Root(directory)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		if h, err := host.Discover(root, affinity); err != nil || h.Name != "" || h.Memory.Total != 0 {
			t.Errorf("%s: %+v, %v", kind, h, err)
		}
		if err := os.Remove(filepath.Join(directory, "affinity")); err != nil {
			t.Fatal(err)
		}
		if err := make(filepath.Join(directory, "affinity")); err != nil {
			t.Fatal(err)
		}
		if _, _, err := host.Root(directory); err == nil {
			t.Errorf("the affinity is %s, and was read", kind)
		}
	}
}

func TestRootOfNothing(t *testing.T) {
	directory := t.TempDir()
	empty := filepath.Join(directory, "empty")
	list := filepath.Join(directory, "list")
	twice := filepath.Join(directory, "twice")
	for name, text := range map[string]string{empty: "", list: "-- affinity --\n3-\n", twice: "-- a --\n-- a --\n"} {
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]string{
		directory + "/none": "no such file", directory: "no CPU", empty: "no CPU", list: `"3-"`, twice: "duplicate",
	} {
		_, _, err := host.Root(name)
		if input, ok := err.(*fault.Input); !ok || !strings.Contains(input.Error(), want) ||
			!strings.Contains(input.Error(), name) {
			t.Errorf("%s: error %v, want %q", name, err, want)
		}
	}
}

// TestRootDirectory: without a file "affinity", the kernel's own files decide which CPUs are usable.
func TestRootDirectory(t *testing.T) {
	directory := t.TempDir()
	write := func(name, text string) {
		name = filepath.Join(directory, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, step := range []struct{ name, text, want string }{
		{"sys/devices/system/cpu/online", "0-7\n", "0-7"},
		{"proc/self/cgroup", "4:cpuset:/a\n", "0-7"},
		{"proc/self/mountinfo", "30 23 0:26 / /c rw - cgroup none rw,cpuset\n", "0-7"},
		{"c/cpuset.cpus", "0-5\n", "0-5"},
		{"proc/self/status", "Cpus_allowed_list:\t0-4\n", "0-4"},
		{"affinity", "1-3\n", "1-3"},
	} {
		write(step.name, step.text)
		_, affinity, err := host.Root(directory)
		if err != nil || affinity.String() != step.want {
			t.Errorf("with %s: %s, %v, want %s", step.name, affinity, err, step.want)
		}
	}
}

// TestRootReads compares with other ways to read a directory.
func TestRootReads(t *testing.T) {
	directory := t.TempDir()
	for name, size := range map[string]int{"affinity": 0, "small": 511, "full": 512, "large": 100_000} {
		text := "1" + strings.Repeat("x", size)
		if name == "affinity" {
			text = "1"
		}
		if err := os.WriteFile(filepath.Join(directory, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	root, _, err := host.Root(directory)
	if err != nil {
		t.Fatal(err)
	}
	if err := fstest.TestFS(root, "affinity", "small", "full", "large"); err != nil {
		t.Error(err)
	}
	if _, err := fs.ReadFile(root, "missing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
}
