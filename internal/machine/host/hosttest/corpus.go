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

	"plimsoll/internal/base/files/filestest"
	"plimsoll/internal/machine/host"
)

// Shared returns a directory of test data outside this repository. It looks beside the repository, or where
// PLIMSOLL_SHARED points. Without the data the test is skipped. Where CI is set it fails, so that missing data never
// gives a green run.
func Shared(t testing.TB, name string) string {
	t.Helper()
	root := os.Getenv("PLIMSOLL_SHARED")
	if root == "" {
		root = filepath.Join(filestest.Root(), "..", "shared")
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

// mostShort is how many CPUs a machine of the corpus has at most where tests are short: half of the time to unpack the
// corpus is for one machine of 2,048 CPUs.
const mostShort = 1024

// Corpus returns every machine of the shared corpus, by name; with -short not the largest. A test binary unpacks them
// once, so tests leave their files alone.
func Corpus(t testing.TB) []Recorded {
	t.Helper()
	directory := Shared(t, corpus)
	unpackedOnce.Do(func() { unpacked, errUnpacked = readCorpus(directory) })
	if errUnpacked != nil {
		t.Fatal(errUnpacked)
	}
	return slices.Clone(unpacked)
}

var (
	unpackedOnce sync.Once
	unpacked     []Recorded
	errUnpacked  error
)

// readCorpus unpacks the machines of a directory.
func readCorpus(directory string) ([]Recorded, error) {
	var expected struct {
		Machines map[string]struct{ Facts Facts }
	}
	if err := readJSON(filepath.Join(directory, "expected.json"), &expected); err != nil {
		return nil, err
	}
	if testing.Short() {
		maps.DeleteFunc(expected.Machines, func(_ string, m struct{ Facts Facts }) bool {
			return m.Facts.PUs > mostShort
		})
	}
	names := slices.Sorted(maps.Keys(expected.Machines))
	machines, failures := make([]Recorded, len(names)), make([]error, len(names))
	var wait sync.WaitGroup
	for i, name := range names {
		facts := expected.Machines[name].Facts
		list := facts.AllowedCPUs
		if facts.StatusCPUs != nil {
			list = *facts.StatusCPUs
		}
		wait.Go(func() {
			affinity, unreadable := host.ParseList(list)
			files, err := readArchive(filepath.Join(directory, name+".tar.bz2"))
			machines[i], failures[i] = Recorded{Machine{name, files, affinity}, facts}, errors.Join(err, unreadable)
		})
	}
	wait.Wait()
	return machines, errors.Join(failures...)
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

// Scenarios applies every scenario of the corpus to its machine; with -short those of the machines that Corpus leaves
// out are left out, too.
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
	if err := readJSON(filepath.Join(Shared(t, corpus), "scenarios.json"), &file); err != nil {
		t.Fatal(err)
	}
	scenarios := []Scenario{}
	for _, s := range file.Scenarios {
		i := slices.IndexFunc(machines, func(m Recorded) bool { return m.Name == s.Base })
		if i < 0 && testing.Short() {
			continue
		}
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

func readJSON(name string, into any) error {
	data, err := os.ReadFile(name)
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
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
