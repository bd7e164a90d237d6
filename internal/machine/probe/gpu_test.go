//go:build linux

package probe

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
)

// heardGPUs tell when nvidia-smi has said something.
type heardGPUs struct {
	*GPUs
	heard chan struct{} // holds one note at most, as the reader looks at everything
}

// await reads the GPUs as they are a time from now, whenever nvidia-smi has said something, until that is so.
func (h *heardGPUs) await(t *testing.T, ahead time.Duration, so func(gpus []samples.GPU, missed []string) bool) {
	t.Helper()
	for limit := time.After(2 * time.Minute); ; {
		gpus, missed := h.readAt(time.Now().Add(ahead))
		if so(gpus, missed) {
			return
		}
		select {
		case <-h.heard:
		case <-limit:
			t.Fatalf("missed %q; %+v", missed, gpus)
		}
	}
}

// fakeDriver puts a program nvidia-smi in the PATH: a shell script with these answers to the two queries.
func fakeDriver(t *testing.T, gpus, processes string) *heardGPUs {
	t.Helper()
	folder := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\ncase \"$1\" in\n--query-gpu=*)\n%s\n;;\n--query-compute-apps=*)\n%s\n;;\nesac\n",
		gpus, processes)
	if err := os.WriteFile(filepath.Join(folder, "nvidia-smi"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", folder+":"+os.Getenv("PATH"))
	heard := make(chan struct{}, 1)
	g := watchGPUs(func() {
		select {
		case heard <- struct{}{}:
		default:
		}
	})
	t.Cleanup(g.Close)
	return &heardGPUs{g, heard}
}

const (
	twoGPUs = `echo '0, GPU-aaa, 81559, 551, 40000, 41008, 0, 0x0000000000000001, 0x0000000000000001, NVIDIA H100 80GB HBM3'
echo '1, GPU-bbb, 81559, [N/A], 50000, 31559, 3, 0x0000000000000048, 0x0000000000000048, Odd, with commas'
`
	oneProcess = `echo '4711, GPU-aaa, 39000'
echo '4712, GPU-bbb, [N/A]'
`
	loop = "\nsleep 0.3; done\n"
)

// shown reads the GPUs until something of that text is missed, or until there are that many GPUs and nothing is.
func shown(t *testing.T, g *heardGPUs, count int, missed string) (shown []samples.GPU) {
	t.Helper()
	g.await(t, 0, func(gpus []samples.GPU, said []string) bool {
		processes := 0
		for _, gpu := range gpus {
			processes += len(gpu.Processes)
		}
		shown = gpus
		all := strings.Join(said, "\n")
		return missed == "" && len(gpus) == count && all == "" && processes == count ||
			missed != "" && strings.Contains(all, missed) && len(gpus) == count
	})
	return shown
}

func TestGPUs(t *testing.T) {
	g := fakeDriver(t, "while :; do\n"+twoGPUs+loop, "while :; do\n"+oneProcess+loop)
	want := []samples.GPU{
		{Index: 0, UUID: "GPU-aaa", Name: "NVIDIA H100 80GB HBM3",
			Total: 81559 * ledger.MiB, Reserved: 551 * ledger.MiB, Used: 40000 * ledger.MiB, Free: 41008 * ledger.MiB,
			Processes: []samples.GPUProcess{{PID: 4711, Used: 39000 * ledger.MiB}}},
		{Index: 1, UUID: "GPU-bbb", Name: "Odd, with commas", Total: 81559 * ledger.MiB, Used: 50000 * ledger.MiB,
			Free: 31559 * ledger.MiB, ECCErrors: 3, Throttled: []string{"hw_slowdown", "hw_thermal_slowdown"},
			Processes: []samples.GPUProcess{{PID: 4712, Used: -1}}},
	}
	if diff := cmp.Diff(want, shown(t, g, 2, "")); diff != "" {
		t.Error(diff)
	}
}

// TestGPUsOfAnOlderDriver: nvidia-smi refuses columns that it does not know, one at a time.
func TestGPUsOfAnOlderDriver(t *testing.T) {
	g := fakeDriver(t, `for field in clocks_event_reasons.active memory.reserved; do
case "$1" in *"$field"*) echo "Field \"$field\" is not a valid field to query."; exit 2;; esac
done
while :; do
echo '0, GPU-aaa, [N/A], [Not Supported], [Insufficient Permissions], [N/A], [0x4], NVIDIA GB10'`+loop,
		"while :; do echo '7, GPU-aaa, 5'"+loop)
	gpus := shown(t, g, 1, "nvidia-smi does not tell the memory of GPU 0")
	gpus[0].Processes = nil // they may come later
	want := []samples.GPU{{UUID: "GPU-aaa", Name: "NVIDIA GB10", ECCErrors: -1}}
	if diff := cmp.Diff(want, gpus); diff != "" {
		t.Error(diff)
	}
}

func TestGPUsThatFail(t *testing.T) {
	const sleep = "\nexec sleep 100"
	for name, test := range map[string]struct {
		gpus, processes string
		count           int
		missed          string
	}{
		"it cannot reach the driver": {"echo 'NVIDIA-SMI has failed because it could not talk to the driver.'; exit 9",
			sleep, 0, "nvidia-smi --query-gpu: NVIDIA-SMI has failed"},
		"it says why on stderr": {"echo 'no such library' >&2; exit 127", sleep, 0, "no such library"},
		"it ends":               {"exit 3", sleep, 0, "exit status 3"},
		"a GPU is lost": {twoGPUs + "echo 'Unable to determine the device handle for GPU0000:01:00.0: " +
			"GPU is lost.'" + sleep, sleep, 2, "GPU is lost"},
		"other text": {"printf 'a, b\\n\\377\\n\\n" + strings.Repeat("x,", 70_000) + "\\n'" + sleep,
			sleep, 0, "--query-gpu: "},
		"a process on a part of a GPU": {twoGPUs + sleep, "echo '7, MIG-ccc, 5'" + sleep, 2,
			"process 7 on GPU MIG-ccc, which it does not list"},
	} {
		t.Run(name, func(t *testing.T) {
			shown(t, fakeDriver(t, test.gpus, test.processes), test.count, test.missed)
		})
	}
}

// TestGPUsThatHang: nvidia-smi shows nothing, or nothing more.
func TestGPUsThatHang(t *testing.T) {
	const sleep = "\nexec sleep 100"
	for name, test := range map[string]struct {
		gpus  string
		count int
	}{"at once": {sleep, 0}, "later": {twoGPUs + sleep, 2}} {
		t.Run(name, func(t *testing.T) {
			g := fakeDriver(t, test.gpus, sleep)
			g.await(t, 0, func(gpus []samples.GPU, missed []string) bool {
				return len(gpus) == test.count && len(missed) == 0
			})
			g.await(t, gpuLifetime+time.Second, func(gpus []samples.GPU, missed []string) bool {
				return len(gpus) == 0 && strings.Contains(strings.Join(missed, "\n"), "nvidia-smi has shown no GPU for")
			})
		})
	}
}

func TestNoGPUs(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if g := WatchGPUs(); g != nil {
		t.Error("nvidia-smi was found")
	}
	g := fakeDriver(t, "echo 'No devices were found'; exit 6", "echo 'No devices were found'; exit 6")
	g.await(t, time.Hour, func(gpus []samples.GPU, missed []string) bool { return len(gpus)+len(missed) == 0 })
}

// TestDriverEndsWithUs kills a process that watches GPUs.
func TestDriverEndsWithUs(t *testing.T) {
	folder := t.TempDir()
	started := filepath.Join(folder, "started")
	if err := errors.Join(unix.Mkfifo(started, 0o600), os.WriteFile(filepath.Join(folder, "nvidia-smi"),
		[]byte("#!/bin/sh\necho $$ >"+started+"\nexec sleep 1000\n"), 0o755)); err != nil {
		t.Fatal(err)
	}
	pipe, err := os.OpenFile(started, os.O_RDWR, 0) // so that neither side waits for the other to open it
	if err != nil {
		t.Fatal(err)
	}
	defer pipe.Close()
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), "PROBE_TEST_HOLD=gpus", "PATH="+folder+":"+os.Getenv("PATH"))
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	processes := []int{}
	for numbers := bufio.NewScanner(pipe); len(processes) < 2 && numbers.Scan(); {
		pid, err := strconv.Atoi(numbers.Text())
		if err != nil {
			t.Fatal(err)
		}
		process, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(process)
		processes = append(processes, process)
	}
	command.Process.Kill()
	command.Wait()
	for _, process := range processes {
		if !ends(t, process) {
			t.Error("nvidia-smi lives on")
			unix.PidfdSendSignal(process, unix.SIGKILL, nil, 0)
		}
	}
}

// ends waits for a process, given by a pidfd, to end. It returns false after a minute.
func ends(t *testing.T, process int) bool {
	t.Helper()
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}}, int(time.Minute/time.Millisecond))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		return n > 0
	}
}

func FuzzGPURows(f *testing.F) {
	f.Add("0, GPU-aaa, 81559, 551, 40000, 41008, 0, 0x1, 0x1, NVIDIA H100 80GB HBM3")
	f.Add("4711, GPU-aaa, 39000")
	f.Fuzz(func(t *testing.T, line string) {
		g := &GPUs{rows: map[string]gpuRow{}, processes: map[gpuProcess]processRow{}, failed: map[string]failure{}}
		g.take(&query{"--query-gpu", []string{"index", "uuid", "memory.total", "memory.used",
			"ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.active", "name"}, g.acceptGPU}, line)
		g.take(&query{"--query-compute-apps", []string{"pid", "gpu_uuid", "used_memory"}, g.acceptProcess}, line)
		gpus, _ := g.Read()
		for _, gpu := range gpus {
			if gpu.Total < 0 || gpu.Used < 0 || gpu.ECCErrors < -1 || gpu.Index < 0 {
				t.Errorf("%+v", gpu)
			}
		}
	})
}
