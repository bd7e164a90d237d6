package evidence

import (
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

// messageKeys are those that hold the text in a log of JSON lines: Docker, Kubernetes, structlog, loguru, zap, logrus,
// journald, CloudWatch and Google Cloud.
var messageKeys = []string{"MESSAGE", "message", "msg", "log", "text", "event", "textPayload", "line", "body",
	"@message"}

// exceptionKeys are those that hold a traceback beside the message: structlog, python-json-logger, Google Cloud.
var exceptionKeys = []string{"exception", "exc_info", "exc_text", "traceback", "stack_trace"}

var (
	timeKeys   = []string{"time", "timestamp", "ts", "asctime", "@timestamp"}
	rankKeys   = []string{"rank", "global_rank", "RANK"}
	streamKeys = []string{"host", "hostname", "_HOSTNAME", "pod", "container", "stream", "pid", "_PID",
		"SYSLOG_IDENTIFIER"}
)

// deepestJSON is how deep JSON may be in JSON: Docker writes JSON of what a logger has written.
const deepestJSON = 3

// unpack returns the texts in a line of JSON, or the text itself.
func unpack(t text, depth int) []text {
	if depth == deepestJSON || !strings.HasPrefix(t.string, "{") {
		return []text{t}
	}
	var object map[string]jsontext.Value
	if err := json.Unmarshal([]byte(t.string), &object, jsontext.AllowDuplicateNames(true),
		jsontext.AllowInvalidUTF8(true)); err != nil {
		return []text{t}
	}
	message := ""
	for _, key := range messageKeys {
		if message = messageOf(object[key]); message != "" {
			break
		}
	}
	for _, key := range exceptionKeys {
		if exception := stringOf(object[key]); strings.Contains(exception, "Traceback") {
			message += "\n" + exception
		}
	}
	if message == "" {
		return []text{t}
	}
	var texts []text
	for line := range strings.Lines(message) {
		inner := clean(strings.TrimRight(line, "\r\n"), t.number)
		inner.inherit(&t)
		inner.labels(object)
		texts = append(texts, unpack(inner, depth+1)...)
	}
	return texts
}

// messageOf returns the text of a message. torchrun's error files have an object with the traceback.
func messageOf(value jsontext.Value) string {
	if value.Kind() != '{' {
		return stringOf(value)
	}
	var object struct {
		Message   string `json:"message"`
		ExtraInfo struct {
			CallStack string `json:"py_callstack"`
		} `json:"extraInfo"`
	}
	if json.Unmarshal(value, &object, jsontext.AllowDuplicateNames(true), jsontext.AllowInvalidUTF8(true)) != nil {
		return ""
	}
	if object.ExtraInfo.CallStack != "" {
		return object.ExtraInfo.CallStack
	}
	return object.Message
}

// inherit takes what the labels in front of the JSON have said.
func (t *text) inherit(outer *text) {
	if t.rank == NoRank {
		t.rank = outer.rank
	}
	if t.time == "" {
		t.time = outer.time
	}
	t.stream = outer.stream + t.stream
	t.kernel = t.kernel || outer.kernel
}

// labels takes what the other members of the JSON say.
func (t *text) labels(object map[string]jsontext.Value) {
	for _, key := range timeKeys {
		if t.time == "" {
			t.time = stringOf(object[key])
		}
	}
	if micros, err := strconv.ParseInt(stringOf(object["__REALTIME_TIMESTAMP"]), 10, 64); err == nil {
		t.time = time.UnixMicro(micros).UTC().Format(time.RFC3339Nano)
	}
	if micros, err := strconv.ParseInt(stringOf(object["_SOURCE_MONOTONIC_TIMESTAMP"]), 10, 64); err == nil {
		t.uptime = time.Duration(micros) * time.Microsecond
	}
	for _, key := range rankKeys {
		if rank, err := strconv.Atoi(stringOf(object[key])); err == nil && t.rank == NoRank && rank >= 0 {
			t.rank = rank
		}
	}
	if stringOf(object["_TRANSPORT"]) == "kernel" {
		t.kernel = true
	}
	for _, key := range streamKeys {
		if value := object[key]; len(value) > 0 && len(value) < 200 {
			t.stream += stringOf(value) + " "
		}
	}
}

// stringOf returns a string, a number as text, or the bytes that journald writes for what is no UTF-8.
func stringOf(value jsontext.Value) string {
	switch value.Kind() {
	case '"':
		var s string
		if json.Unmarshal(value, &s, jsontext.AllowInvalidUTF8(true)) == nil {
			return s
		}
	case '0':
		return string(value)
	case '[':
		var bytes []uint8
		var numbers []int
		if json.Unmarshal(value, &numbers) == nil {
			for _, n := range numbers {
				bytes = append(bytes, byte(n))
			}
			return string(bytes)
		}
	}
	return ""
}
