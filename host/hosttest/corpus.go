package hosttest

import (
	"archive/tar"
	"compress/bzip2"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"testing"
)

// Shared returns a directory of test data outside this repository. It looks beside the repository, or where
// PLIMSOLL_SHARED points. Without the data the test is skipped. Where CI is set it fails, so that missing data never
// gives a green run.
func Shared(t testing.TB, name string) string {
	t.Helper()
	root := os.Getenv("PLIMSOLL_SHARED")
	if root == "" {
		root = sharedBeside()
	}
	directory := filepath.Join(root, name)
	if _, err := os.Stat(directory); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("shared data: %v (set PLIMSOLL_SHARED)", err)
		}
		t.Skipf("shared data: %v (set PLIMSOLL_SHARED)", err)
	}
	return directory
}

// sharedBeside returns the directory "shared" beside the module's root. The root is the nearest ancestor of a test's
// directory with a go.mod.
func sharedBeside() string {
	directory, err := os.Getwd()
	for err == nil && directory != "/" {
		if _, err := os.Stat(filepath.Join(directory, "go.mod")); err == nil {
			return filepath.Join(directory, "..", "shared")
		}
		directory = filepath.Dir(directory)
	}
	return "shared"
}

// Facts are the findings of an independent reader on a recorded machine.
type Facts struct {
	Online         string   `json:"online"`
	AllowedCPUs    string   `json:"allowed_cpus_cgroup"`
	AllowedMemory  string   `json:"allowed_mems_cgroup"`
	StatusCPUs     *string  `json:"status_cpus_allowed"`
	StatusMemory   *string  `json:"status_mems_allowed"`
	Isolated       string   `json:"isolated"`
	Packages       *int     `json:"packages"`
	PackageCPUs    []string `json:"package_cpus"`
	PhysicalCores  int      `json:"physical_cores"`
	SMTSiblings    []string `json:"smt_siblings"`
	ThreadsPerCore []int    `json:"threads_per_core"`
	PUs            int      `json:"pus"`
	L3Groups       []string `json:"l3_groups"`
	L2Groups       []string `json:"l2_groups"`
	CPUsOfNoNode   string   `json:"cpus_without_node"`
	// Kinds are the properties that differ between kinds of cores; none on an ordinary machine.
	Kinds map[string]any `json:"cpu_kinds"`
	Nodes []struct {
		ID         int    `json:"id"`
		CPUs       string `json:"cpus"`
		MemKB      *int64 `json:"mem_kb"`
		CPULess    bool   `json:"cpuless"`
		MemoryLess bool   `json:"memoryless"`
		GPUMemory  bool   `json:"gpu_memory"`
		Distance   []int  `json:"distance"`
		Nearest    string `json:"nearest_cpus_by_hwloc"`
	} `json:"numa_nodes"`
	GPUs []struct {
		Address string `json:"busid"`
		Class   string `json:"cls"`
		Vendor  string `json:"vendor"`
		CPUs    string `json:"local_cpus"`
		Node    *int   `json:"numa_node"`
	} `json:"gpus"`
	Disagreements []string `json:"disagreements"`
}

// Recorded is a machine of the shared corpus with its facts.
type Recorded struct {
	Machine
	Facts Facts
}

const corpus = "data/topologies/dev"

// Corpus returns every machine of the shared corpus, by name.
func Corpus(t testing.TB) []Recorded {
	t.Helper()
	directory := Shared(t, corpus)
	var expected struct {
		Machines map[string]struct{ Facts Facts }
	}
	readJSON(t, filepath.Join(directory, "expected.json"), &expected)
	names := slices.Sorted(maps.Keys(expected.Machines))
	machines, failures := make([]Recorded, len(names)), make([]error, len(names))
	var wait sync.WaitGroup
	for i, name := range names {
		facts := expected.Machines[name].Facts
		affinity := parse(t, facts.AllowedCPUs)
		if facts.StatusCPUs != nil {
			affinity = parse(t, *facts.StatusCPUs)
		}
		wait.Go(func() {
			files, err := readArchive(filepath.Join(directory, name+".tar.bz2"))
			machines[i], failures[i] = Recorded{Machine{name, files, affinity}, facts}, err
		})
	}
	wait.Wait()
	if err := errors.Join(failures...); err != nil {
		t.Fatal(err)
	}
	return machines
}

// Scenario is a machine of the corpus under the restrictions of a batch system or a container, with the expected
// findings.
type Scenario struct {
	Machine
	Expected struct {
		UsableCPUs       string   `json:"usable_cpus"`
		UsableCores      int      `json:"usable_cores"`
		WholeCores       int      `json:"whole_cores"`
		OneThreadPerCore string   `json:"one_thread_per_core"`
		AllowedMemory    string   `json:"mems_allowed"`
		MemoryNodes      string   `json:"memory_nodes_for_default_use"`
		Quota            *float64 `json:"quota_cpus"`
		MemoryLimit      *int64   `json:"memory_limit_bytes"`
	}
}

// Scenarios applies every scenario of the corpus to its machine.
func Scenarios(t testing.TB, machines []Recorded) []Scenario {
	t.Helper()
	var file struct {
		Scenarios []struct {
			Name, Base string
			Affinity   string `json:"sched_getaffinity"`
			Files      map[string]string
			Expected   json.RawMessage
		}
	}
	readJSON(t, filepath.Join(Shared(t, corpus), "scenarios.json"), &file)
	scenarios := []Scenario{}
	for _, s := range file.Scenarios {
		i := slices.IndexFunc(machines, func(m Recorded) bool { return m.Name == s.Base })
		if i < 0 {
			t.Fatalf("scenario %s: no machine %s", s.Name, s.Base)
		}
		files := machines[i].Files.Clone()
		for name, text := range s.Files {
			files.Set(name, []byte(text))
		}
		scenario := Scenario{Machine: Machine{s.Name, files, parse(t, s.Affinity)}}
		if err := json.Unmarshal(s.Expected, &scenario.Expected); err != nil {
			t.Fatalf("scenario %s: %v", s.Name, err)
		}
		scenarios = append(scenarios, scenario)
	}
	return scenarios
}

func readJSON(t testing.TB, name string, into any) {
	t.Helper()
	data, err := os.ReadFile(name)
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
}

// readArchive reads a .tar.bz2. It replaces a link to a directory by copies of the files in it, one level deep: the
// kernel's links form circles.
func readArchive(name string) (Files, error) {
	file, err := os.Open(name)
	if err != nil {
		return Files{}, err
	}
	defer file.Close()
	files, links := NewFiles(nil), map[string]string{}
	for reader := tar.NewReader(bzip2.NewReader(file)); ; {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return Files{}, fmt.Errorf("%s: %w", name, err)
		}
		switch path := path.Clean(header.Name); header.Typeflag {
		case tar.TypeReg:
			data, err := io.ReadAll(reader)
			if err != nil {
				return Files{}, fmt.Errorf("%s: %w", name, err)
			}
			files.Set(path, data)
		case tar.TypeSymlink:
			links[path] = header.Linkname
		}
	}
	for _, link := range slices.Sorted(maps.Keys(links)) {
		target := path.Join(path.Dir(link), links[link])
		for base, entry := range files.entries[target] {
			if entry.Mode.IsRegular() {
				files.Set(path.Join(link, base), entry.Data)
			}
		}
		if data, ok := files.content[target]; ok {
			files.Set(link, data)
		}
	}
	return files, nil
}
