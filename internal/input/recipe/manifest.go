package recipe

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/input/launcher"
	"plimsoll/internal/input/shell"
)

// A manifest of Kubernetes says what a script and its batch system say elsewhere: the command, the pods and what each
// of them has.

// isManifest reports whether a text may be a manifest with containers.
func isManifest(text []byte) bool {
	return bytes.Contains(text, []byte("apiVersion:")) && bytes.Contains(text, []byte("containers:")) &&
		!bytes.HasPrefix(bytes.TrimSpace(text), []byte("#!"))
}

// pod is a pod of a manifest.
type pod struct {
	container *yaml.Node
	in        launcher.Allocation
	variables map[string]shell.Word
}

// manifest reads the pods of a manifest.
type manifest struct {
	starts []int // of the lines
	pods   []pod
	kind   string
}

// readManifest returns the commands of the containers of a manifest, and what the pods have.
func readManifest(file string, text []byte) (*shell.Script, launcher.Allocation, error) {
	m := &manifest{starts: []int{0}}
	for i, c := range text {
		if c == '\n' {
			m.starts = append(m.starts, i+1)
		}
	}
	decoder := yaml.NewDecoder(bytes.NewReader(text))
	for range mostDocuments {
		var document yaml.Node
		if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			wrong := &fault.Input{Where: fault.Position{File: file}, What: "this is no YAML", Err: err}
			return nil, launcher.Allocation{}, wrong
		}
		if len(document.Content) == 1 {
			m.kind = cmp.Or(textOf(member(document.Content[0], "kind")), m.kind)
			m.walk(document.Content[0], nil, 0)
		}
	}
	return m.script(file)
}

// Limits of a manifest: its documents, and how deep they are.
const mostDocuments, deepest = 64, 32

// script returns the commands of the pods.
func (m *manifest) script(file string) (*shell.Script, launcher.Allocation, error) {
	in := m.allocation()
	all := &shell.Script{Lists: map[string][]shell.Word{}, Written: map[string]string{}}
	seen := map[string]bool{}
	for _, p := range m.pods {
		variables := in.Environment()
		if m.kind == "PyTorchJob" && in.Nodes != nil {
			nodes := shell.Word{Text: strconv.Itoa(in.Nodes.Is), At: in.Nodes.At}
			variables["PET_NNODES"], variables["WORLD_SIZE"] = nodes, nodes
		}
		for name, value := range p.variables {
			variables[name] = value
		}
		words := m.words(p.container, variables)
		text := (&shell.Command{Words: words}).Text()
		if len(words) == 0 || seen[text] { // workers run what the master runs
			continue
		}
		seen[text] = true
		s, err := shell.ReadWords(file, words, variables)
		if err != nil {
			return nil, in, err
		}
		all.Commands = append(all.Commands, s.Commands...)
	}
	in.Spawns = m.kind == "PyTorchJob"
	return all, in, nil
}

// allocation returns what all pods with GPUs have: those of one kind are the nodes of a job.
func (m *manifest) allocation() (in launcher.Allocation) {
	nodes := 0
	var at int64
	for _, p := range m.pods {
		if p.in.GPUs == nil && m.hasGPUs() {
			continue
		}
		if in.GPUs == nil {
			in.GPUs, in.Memory = p.in.GPUs, p.in.Memory
		}
		nodes, at = nodes+p.in.Nodes.Is, p.in.Nodes.At
	}
	if nodes > 0 {
		in.Nodes = &launcher.Count{At: at, Name: "replicas", Is: nodes}
	}
	return in
}

func (m *manifest) hasGPUs() bool {
	for _, p := range m.pods {
		if p.in.GPUs != nil {
			return true
		}
	}
	return false
}

// walk finds the pods below a node. Replicas multiply on the way down.
func (m *manifest) walk(n *yaml.Node, replicas *launcher.Count, depth int) {
	if depth > deepest || n == nil {
		return
	}
	if n.Kind == yaml.SequenceNode {
		for _, item := range n.Content {
			m.walk(item, replicas, depth+1)
		}
		return
	}
	if n.Kind != yaml.MappingNode {
		return
	}
	for _, name := range []string{"replicas", "parallelism"} {
		if v := member(n, name); v != nil {
			if count, err := strconv.Atoi(v.Value); err == nil && count > 0 && count < 1<<16 {
				before := 1
				if replicas != nil {
					before = replicas.Is
				}
				replicas = &launcher.Count{At: m.at(v), Name: name, Is: min(before*count, 1<<20)}
			}
		}
	}
	if list := member(n, "containers"); list != nil && list.Kind == yaml.SequenceNode {
		m.add(list, replicas)
		return
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		m.walk(n.Content[i+1], replicas, depth+1)
	}
}

// add adds the containers of a pod.
func (m *manifest) add(list *yaml.Node, replicas *launcher.Count) {
	if replicas == nil {
		replicas = &launcher.Count{At: m.at(list), Name: "a pod", Is: 1}
	}
	for _, c := range list.Content {
		p := pod{container: c, in: launcher.Allocation{Nodes: replicas}, variables: map[string]shell.Word{}}
		resources := member(c, "resources")
		for _, section := range []string{"requests", "limits"} {
			limits := member(resources, section)
			for i := 0; limits != nil && i+1 < len(limits.Content); i += 2 {
				m.limit(&p.in, limits.Content[i].Value, limits.Content[i+1])
			}
		}
		variables := member(c, "env")
		for i := 0; variables != nil && i < len(variables.Content); i++ {
			name, value := member(variables.Content[i], "name"), member(variables.Content[i], "value")
			if name != nil && value != nil {
				p.variables[name.Value] = shell.Word{Text: value.Value, At: m.at(value)}
			}
		}
		m.pods = append(m.pods, p)
	}
}

// limit notes the GPUs and the memory of a container.
func (m *manifest) limit(in *launcher.Allocation, name string, v *yaml.Node) {
	isDevice := strings.HasSuffix(name, "/gpu") || strings.Contains(name, "Ascend") || strings.HasSuffix(name, "/npu")
	switch n, err := strconv.Atoi(v.Value); {
	case isDevice && err == nil && n > 0:
		in.GPUs = &launcher.Count{At: m.at(v), Name: name, Is: n}
	case name == "memory":
		if size, is := launcher.Size(v.Value); is {
			in.Memory = &launcher.Memory{At: m.at(v), Name: "memory", Is: size}
		}
	}
}

// reference matches a variable as Kubernetes puts it into commands: $(NAME).
var reference = lazyregexp.New(`\$\((\w+)\)`)

// words returns the command of a container with its arguments.
func (m *manifest) words(c *yaml.Node, variables map[string]shell.Word) (words []shell.Word) {
	for _, key := range []string{"command", "args"} {
		list := member(c, key)
		for i := 0; list != nil && i < len(list.Content); i++ {
			v := list.Content[i]
			text := reference.ReplaceAllStringFunc(v.Value, func(found string) string {
				if value, is := variables[found[2:len(found)-1]]; is {
					return value.Text
				}
				return found
			})
			words = append(words, shell.Word{Text: text, At: m.at(v), Quoted: true})
		}
	}
	return words
}

// at returns the offset of a node in the file.
func (m *manifest) at(n *yaml.Node) int64 {
	if n.Line < 1 || n.Line > len(m.starts) {
		return 0
	}
	return int64(m.starts[n.Line-1] + n.Column - 1)
}

// member returns the value of a key of a mapping, nil for none.
func member(n *yaml.Node, key string) *yaml.Node {
	if n == nil || n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

func textOf(n *yaml.Node) string {
	if n == nil {
		return ""
	}
	return n.Value
}
