package evidence

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"

	"github.com/go-json-experiment/json/jsontext"

	"plimsoll/internal/base/lazyregexp"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
	_ "plimsoll/internal/input/recipe/programs" // recognizes files
	"plimsoll/internal/input/recipe/strict"
)

// largestDocument is how much of a document is parsed. A larger one is read line by line.
const largestDocument = 16 << 20

// shape is a kind of JSON or YAML document, by the names of the members of its object, or of the first object of its
// array.
type shape struct {
	kind    Kind
	members string // all of these
	only    bool   // and no others
	text    string // that the head has, too
	array   bool   // the object is in an array
	read    func(r *reader, d *document)
}

// shapes are tried in this order.
var shapes = []shape{
	{kind: Kubernetes, members: "apiVersion kind", read: readKubernetes},
	{kind: Kubernetes, members: "metadata spec status", read: readKubernetes},
	{kind: Kubernetes, members: "status", only: true, text: "ontainerStatuses", read: readKubernetes},
	{kind: Kubernetes, members: "containerID state", array: true, read: readContainerStatuses},
	{kind: Docker, members: "State HostConfig", array: true, read: readDocker},
	{kind: Docker, members: "State HostConfig", read: readDocker},
	{kind: Slurm, members: "jobs", read: readSlurm},
	{kind: Trace, members: "traceEvents"},
	{kind: Trace, members: "ph ts", array: true},
	{kind: TrainerLog, members: "global_step log_history", read: readTrainerState},
}

// document is a text that was parsed as a whole.
type document struct {
	*strict.Document
	first int // its first line in the file, from 0
}

// add adds a finding at a value.
func (d *document) add(r *reader, v *strict.Value, fact Fact) {
	at := d.Position(v.At)
	start := int(v.At) - at.Column + 1
	line, _, _ := bytes.Cut(d.Text[start:], []byte{'\n'})
	t := clean(string(line[:min(len(line), longestLine)]), d.first+at.Line)
	r.add(&t, fact)
}

// document reads a file that is one document rather than lines. For lines it returns the reader to go on with.
func (r *reader) document(from *bufio.Reader) (*bufio.Reader, error) {
	head, err := from.Peek(headSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if kind, binary := binaryKind(head); binary {
		r.source.Kind = kind
		return nil, nil
	}
	r.binary = isBinary(head)
	if kind := plimsollKind(head); kind != Unknown {
		r.source.Kind = kind
		return nil, nil
	}
	s := shapeOf(head)
	switch whole := err != nil; {
	case s == nil && whole && (r.number(head) || r.configuration(head)):
		return nil, nil
	case s == nil:
		return from, nil
	case s.read == nil:
		r.source.Kind = s.kind
		return nil, nil
	}
	text, err := io.ReadAll(io.LimitReader(from, largestDocument))
	if err != nil {
		return nil, err
	}
	if len(text) < largestDocument && r.parse(s, text) {
		return nil, nil
	}
	return bufio.NewReaderSize(io.MultiReader(bytes.NewReader(text), from), headSize), nil
}

// magics are the first bytes of files without lines.
var magics = []string{"PK\x03\x04", "\x7fELF", "\x89HDF", "\x89PNG", "%PDF"}

// binaryKind returns the kind of a file that is no text. A pickle of a memory snapshot has names of its members near
// its beginning.
func binaryKind(head []byte) (kind Kind, binary bool) {
	for _, magic := range magics {
		if bytes.HasPrefix(head, []byte(magic)) {
			return Binary, true
		}
	}
	if len(head) < 2 || head[0] != 0x80 || head[1] < 2 || head[1] > 5 {
		return Unknown, false
	}
	for _, name := range []string{"segments", "device_traces", "segment_type"} {
		if bytes.Contains(head, []byte(name)) {
			return Snapshot, true
		}
	}
	return Binary, true
}

// isBinary reports whether more than a twentieth of the bytes are control characters that texts do not have.
func isBinary(head []byte) bool {
	strange := 0
	for _, b := range head {
		if b < ' ' && !bytes.ContainsRune([]byte("\t\n\r\b\f\x1b"), rune(b)) {
			strange++
		}
	}
	return strange > len(head)/20
}

var plimsollSchema = lazyregexp.New(`^\s*\{[^\x00]{0,200}?"schema":\s*"plimsoll\.(plan|samples|explanation)/\d+"`)

// plimsollKind returns the kind of a document of plimsoll itself.
func plimsollKind(head []byte) Kind {
	groups := plimsollSchema.FindSubmatch(head[:min(len(head), 4096)])
	if groups == nil {
		return Unknown
	}
	return map[string]Kind{"plan": Plan, "samples": Recording, "explanation": Explanation}[string(groups[1])]
}

var (
	timelineStart = lazyregexp.New(`^\s*\[\s*\[\s*\d`)
	yamlStart     = lazyregexp.New(`^(?:(?:#[^\n]*|---)?\r?\n)*[A-Za-z]\w*:(?:\s|$)`)
	yamlMember    = lazyregexp.New(`(?m)^([A-Za-z]\w*):(?:\s|$)`)
)

// shapeOf returns the shape of a document by its head, or nil.
func shapeOf(head []byte) *shape {
	names, array := map[string]bool{}, false
	switch {
	case timelineStart.Match(head):
		return &shape{kind: Timeline}
	case yamlStart.Match(head):
		for _, groups := range yamlMember.FindAllSubmatch(head, 100) {
			names[string(groups[1])] = true
		}
	default:
		names, array = memberNames(head)
	}
	for i := range shapes {
		s := &shapes[i]
		has := s.array == array && len(names) > 0 && (!s.only || len(names) == len(strings.Fields(s.members))) &&
			bytes.Contains(head, []byte(s.text))
		for name := range strings.FieldsSeq(s.members) {
			has = has && names[name]
		}
		if has {
			return s
		}
	}
	return nil
}

// memberNames returns the names of the members of a JSON object, or of the first object of an array, as far as the
// head goes.
func memberNames(head []byte) (names map[string]bool, array bool) {
	names = map[string]bool{}
	d := jsontext.NewDecoder(bytes.NewReader(head), jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true))
	begin, err := d.ReadToken()
	if err == nil && begin.Kind() == '[' {
		array = true
		begin, err = d.ReadToken()
	}
	if err != nil || begin.Kind() != '{' {
		return nil, array
	}
	for len(names) < 1000 {
		name, err := d.ReadToken()
		if err != nil || name.Kind() != '"' {
			break
		}
		names[name.String()] = true
		if err := d.SkipValue(); err != nil {
			break
		}
	}
	return names, array
}

var onlyNumber = lazyregexp.New(`^\s*(?:(?i:\$\?|rc|exit(?: code| status)?|status)\s*[=:]?\s*)?(-?\d{1,3})\s*$`)

// number reads a file that has nothing but an exit code.
func (r *reader) number(file []byte) bool {
	groups := onlyNumber.FindSubmatch(file[:min(len(file), 100)])
	if groups == nil || len(file) > 100 {
		return false
	}
	f := endOf("shell", atoi(string(groups[1])))
	r.source.Kind, r.source.Lines = ExitCode, 1
	r.add(&text{string: string(bytes.TrimSpace(file)), number: 1, rank: NoRank}, f)
	return true
}

// largestConfiguration is in bytes. Configurations have some KB.
const largestConfiguration = 32 << 10

// configuration recognizes the configuration of a trainer. Package recipe reads it.
func (r *reader) configuration(text []byte) bool {
	trimmed := bytes.TrimSpace(text)
	if len(text) > largestConfiguration || len(trimmed) == 0 ||
		!yamlStart.Match(text) && trimmed[0] != '{' && !bytes.HasPrefix(trimmed, []byte("//")) {
		return false
	}
	kind, flag := recipe.Recognize(text)
	r.source.Kind, r.source.Flag = Kind(kind), flag
	return kind != ""
}

// parse reads a document of a shape. It returns false for a text that is cut, or is several documents of JSON.
func (r *reader) parse(s *shape, text []byte) bool {
	if !yamlStart.Match(text) {
		parsed, err := strict.ParseJSON(r.source.Name, text)
		if err != nil || parsed.Root == nil {
			return false
		}
		s.read(r, &document{Document: parsed})
		r.source.Kind = s.kind
		return true
	}
	first, read := 0, false
	for part := range bytes.SplitSeq(text, []byte("\n---")) {
		if len(bytes.TrimSpace(part)) > 0 {
			if parsed, err := strict.Parse("document.yaml", part); err == nil && parsed.Root != nil {
				s.read(r, &document{Document: parsed, first: first})
				read = true
			}
		}
		first += bytes.Count(part, []byte{'\n'}) + 1
	}
	if read {
		r.source.Kind = s.kind
	}
	return read
}

// each calls f for the elements of an array, or for a value that is none.
func each(v *strict.Value, f func(*strict.Value)) {
	switch {
	case v == nil:
	case v.Kind == '[':
		for _, element := range v.Elements {
			f(element)
		}
	default:
		f(v)
	}
}

// textAt returns the string or number at a path, or "".
func textAt(v *strict.Value, path string) string {
	if v == nil {
		return ""
	}
	if found := v.Find(path); found != nil {
		return found.Text
	}
	return ""
}

// sizeAt returns the number of bytes at a path.
func sizeAt(v *strict.Value, path string, unit ledger.Bytes) Size {
	return sizeOf(textAt(v, path), unit)
}

// readTrainerState reads trainer_state.json of transformers.
func readTrainerState(r *reader, d *document) {
	if v := d.Root.Find("global_step"); v != nil {
		d.add(r, v, Progress{Step: int64(atoi(v.Text))})
	}
}
