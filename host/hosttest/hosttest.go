// Package hosttest loads recorded machines, so that tests can discover hosts
// other than the one they run on.
package hosttest

import (
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/tools/txtar"
	"k8s.io/utils/cpuset"

	"plimsoll/host"
)

// Machine is a recorded machine as one process sees it.
type Machine struct {
	Name     string
	Files    Files
	Affinity cpuset.CPUSet // what sched_getaffinity returned
}

// Discover is host.Discover of the machine.
func (m Machine) Discover(t testing.TB) *host.Host {
	t.Helper()
	h, err := host.Discover(m.Files, m.Affinity)
	if err != nil {
		t.Fatalf("%s: %v", m.Name, err)
	}
	return h
}

// Files is a file system in memory: path to content. It serves what discovery
// asks for (whole files and directories) in time that does not grow with the
// number of files, of which large machines have many.
type Files struct {
	content map[string][]byte
	entries map[string]fstest.MapFS // by directory: its entries, as one flat file system
}

// NewFiles makes a file system of regular files.
func NewFiles(content map[string][]byte) Files {
	f := Files{map[string][]byte{}, map[string]fstest.MapFS{}}
	for name, data := range content {
		f.Set(name, data)
	}
	return f
}

// Set adds or replaces a file.
func (f Files) Set(name string, data []byte) {
	f.content[name] = data
	f.enter(name, &fstest.MapFile{Data: data, Mode: 0o444})
}

func (f Files) enter(name string, file *fstest.MapFile) {
	directory, base := path.Dir(name), path.Base(name)
	if f.entries[directory] == nil {
		f.entries[directory] = fstest.MapFS{}
		if directory != "." {
			f.enter(directory, &fstest.MapFile{Mode: fs.ModeDir | 0o555})
		}
	}
	f.entries[directory][base] = file
}

// Clone is a copy that can be changed without changing f.
func (f Files) Clone() Files { return NewFiles(f.content) }

// Open opens a file or a directory.
func (f Files) Open(name string) (fs.File, error) {
	if entries, ok := f.entries[name]; ok {
		return entries.Open(".")
	}
	if entries, ok := f.entries[path.Dir(name)]; ok && fs.ValidPath(name) && entries[path.Base(name)] != nil {
		return entries.Open(path.Base(name))
	}
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
}

// ReadFile reads a file whole.
func (f Files) ReadFile(name string) ([]byte, error) {
	if data, ok := f.content[name]; ok {
		return slices.Clone(data), nil
	}
	return nil, &fs.PathError{Op: "read", Path: name, Err: fs.ErrNotExist}
}

// ReadText loads a machine from txtar archives, later ones laid over earlier
// ones. The file "affinity" is the list that sched_getaffinity returned.
func ReadText(t testing.TB, names ...string) Machine {
	t.Helper()
	files := NewFiles(nil)
	for _, name := range names {
		archive, err := txtar.ParseFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range archive.Files {
			files.Set(file.Name, file.Data)
		}
	}
	affinity, err := files.ReadFile("affinity")
	if err != nil {
		t.Fatalf("%s: %v", names, err)
	}
	return Machine{filepath.Base(names[len(names)-1]), files, parse(t, string(affinity))}
}

// Grid makes a machine of equal sockets, each a NUMA node with one cache. As
// Linux does on most servers, it numbers the first thread of every core before
// the second of any.
func Grid(sockets, cores, threads int) Machine {
	return grid(sockets, cores, threads, func(core, thread int) int { return core + thread*sockets*cores })
}

// AdjacentGrid is the same machine numbered core by core, as POWER, many Arm
// servers and QEMU do.
func AdjacentGrid(sockets, cores, threads int) Machine {
	return grid(sockets, cores, threads, func(core, thread int) int { return core*threads + thread })
}

func grid(sockets, cores, threads int, id func(core, thread int) int) Machine {
	files := NewFiles(nil)
	set := func(format string, values ...any) {
		name, text, _ := strings.Cut(fmt.Sprintf(format, values...), "=")
		files.Set("sys/devices/system/"+name, []byte(text+"\n"))
	}
	for socket := range sockets {
		cpus := []int{}
		for core := socket * cores; core < (socket+1)*cores; core++ {
			siblings := []int{}
			for thread := range threads {
				siblings = append(siblings, id(core, thread))
			}
			cpus = append(cpus, siblings...)
			for _, cpu := range siblings {
				set("cpu/cpu%d/topology/core_cpus_list=%v", cpu, cpuset.New(siblings...))
			}
		}
		list := cpuset.New(cpus...).String()
		distances := slices.Repeat([]string{"20"}, sockets)
		distances[socket] = "10"
		set("node/node%d/cpulist=%s", socket, list)
		set("node/node%d/distance=%s", socket, strings.Join(distances, " "))
		set("node/node%d/meminfo=Node %d MemTotal: 67108864 kB", socket, socket)
		for _, cpu := range cpus {
			set("cpu/cpu%d/topology/physical_package_id=%d", cpu, socket)
			set("cpu/cpu%d/topology/package_cpus_list=%s", cpu, list)
			set("cpu/cpu%d/cache/index3/level=3", cpu)
			set("cpu/cpu%d/cache/index3/type=Unified", cpu)
			set("cpu/cpu%d/cache/index3/shared_cpu_list=%s", cpu, list)
		}
	}
	online := fmt.Sprintf("0-%d", sockets*cores*threads-1)
	set("cpu/online=%s", online)
	affinity, err := host.ParseList(online)
	if err != nil {
		panic(err) // more CPUs than any kernel has
	}
	return Machine{fmt.Sprintf("%d sockets, %d cores, %d threads", sockets, cores, threads), files, affinity}
}

func parse(t testing.TB, list string) cpuset.CPUSet {
	t.Helper()
	set, err := host.ParseList(list)
	if err != nil {
		t.Fatal(err)
	}
	return set
}
