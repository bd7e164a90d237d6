// Package hosttest loads and makes machines, so that tests can discover hosts other than their own.
package hosttest

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/tools/txtar"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/host"
)

// Machine is a recorded machine as one process sees it.
type Machine struct {
	Name     string
	Files    Files
	Affinity cpuset.CPUSet // the result of sched_getaffinity
}

// Discover runs host.Discover on the machine.
func (m Machine) Discover(t testing.TB) *host.Host {
	t.Helper()
	h, err := host.Discover(m.Files, m.Affinity)
	if err != nil {
		t.Fatalf("%s: %v", m.Name, err)
	}
	return h
}

// Files is a file system in memory: path to content. It serves files and directories in a time that does not grow
// with the number of files; large machines have many.
type Files struct {
	content map[string][]byte
	entries map[string]fstest.MapFS // the entries of each directory, as a flat file system
}

// NewFiles returns a file system of regular files.
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

// Clone returns a copy; changes to it leave f alone.
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

// ReadFile returns the content of a file.
func (f Files) ReadFile(name string) ([]byte, error) {
	if data, ok := f.content[name]; ok {
		return slices.Clone(data), nil
	}
	return nil, &fs.PathError{Op: "read", Path: name, Err: fs.ErrNotExist}
}

// ReadText loads a machine from txtar archives; later archives override earlier ones. The file "affinity" holds the
// list that sched_getaffinity returned.
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

// Core describes a physical core for Build.
type Core struct {
	CPUs                 []int
	Package, Node, Cache int
	Capacity             int // cpu_capacity; 0 for no such file
}

// Build returns a machine with these cores.
func Build(name string, cores []Core) Machine {
	files := NewFiles(nil)
	set := func(name, text string) { files.Set("sys/devices/system/"+name, []byte(text+"\n")) }
	online := []int{}
	packages, nodes, caches := map[int][]int{}, map[int][]int{}, map[int][]int{}
	for _, core := range cores {
		online = append(online, core.CPUs...)
		packages[core.Package] = append(packages[core.Package], core.CPUs...)
		nodes[core.Node] = append(nodes[core.Node], core.CPUs...)
		caches[core.Cache] = append(caches[core.Cache], core.CPUs...)
	}
	lists := func(groups map[int][]int) map[int]string {
		lists := map[int]string{}
		for id, cpus := range groups {
			lists[id] = cpuset.New(cpus...).String()
		}
		return lists
	}
	packageLists, cacheLists := lists(packages), lists(caches)
	for _, core := range cores {
		siblings := cpuset.New(core.CPUs...).String()
		for _, cpu := range core.CPUs {
			directory := "cpu/cpu" + strconv.Itoa(cpu) + "/"
			set(directory+"topology/core_cpus_list", siblings)
			set(directory+"topology/physical_package_id", strconv.Itoa(core.Package))
			set(directory+"topology/package_cpus_list", packageLists[core.Package])
			set(directory+"cache/index3/level", "3")
			set(directory+"cache/index3/type", "Unified")
			set(directory+"cache/index3/shared_cpu_list", cacheLists[core.Cache])
			if core.Capacity > 0 {
				set(directory+"cpu_capacity", strconv.Itoa(core.Capacity))
			}
		}
	}
	ids := slices.Sorted(maps.Keys(nodes))
	for i, list := range lists(nodes) {
		directory := "node/node" + strconv.Itoa(i) + "/"
		distances := slices.Repeat([]string{"20"}, len(ids))
		distances[slices.Index(ids, i)] = "10"
		set(directory+"cpulist", list)
		set(directory+"distance", strings.Join(distances, " "))
		set(directory+"meminfo", fmt.Sprintf("Node %d MemTotal: 67108864 kB", i))
	}
	affinity := cpuset.New(online...)
	set("cpu/online", affinity.String())
	return Machine{name, files, affinity}
}

// Grid returns a machine of equal sockets, each a NUMA node with one cache. It numbers the first thread of every core
// before any second thread, as Linux does on most servers.
func Grid(sockets, cores, threads int) Machine {
	return grid(sockets, cores, threads, func(core, thread int) int { return core + thread*sockets*cores })
}

// AdjacentGrid returns the same machine numbered core by core, as on POWER, many Arm servers and QEMU.
func AdjacentGrid(sockets, cores, threads int) Machine {
	return grid(sockets, cores, threads, func(core, thread int) int { return core*threads + thread })
}

func grid(sockets, cores, threads int, id func(core, thread int) int) Machine {
	all := []Core{}
	for core := range sockets * cores {
		socket := core / cores
		made := Core{Package: socket, Node: socket, Cache: socket}
		for thread := range threads {
			made.CPUs = append(made.CPUs, id(core, thread))
		}
		all = append(all, made)
	}
	return Build(fmt.Sprintf("%d sockets, %d cores, %d threads", sockets, cores, threads), all)
}

func parse(t testing.TB, list string) cpuset.CPUSet {
	t.Helper()
	set, err := host.ParseList(list)
	if err != nil {
		t.Fatal(err)
	}
	return set
}
