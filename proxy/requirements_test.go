package proxy

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// requirements names, for each requirement on a transparent proxy (R1 to R35
// of the design's reference), the tests that hold weir to it. R32 is about
// HTTP/2 on the same port; R35 asks for the race detector, which `make unit`
// switches on for all of them.
var requirements = map[string][]string{
	"R1 both bodies at once, the head at once":            {"TestTheTwoBodiesOfOneRequestFlowAtOnce", "TestAnEarlyAnswerIsNotDelayedByAClientThatSendsNothing"},
	"R2 an early answer survives the server's close":      {"TestAnEarlyAnswerReachesTheClient"},
	"R3 a bounded drain after an early answer":            {"TestAnEarlyAnswerIsNotDelayedByAClientThatSendsNothing", "TestAnAnswerSurvivesWhatTheClientSentAfterIt"},
	"R4 a client that leaves is noticed":                  {"TestAClientThatLeavesEndsTheServersWork", "TestAClientThatLeavesIsSeenWhileTheServerReadsNothing", "TestAWatchedConnectionCanBeUsedAgain"},
	"R5 half-close is a setting, in tunnels a byte":       {"TestAClientThatLeavesEndsTheServersWork", "TestAHalfClosedClientIsServedWhereThatIsWanted", "TestATunnelCarriesBytesAndHalfClosesBothWays"},
	"R6 nothing is held back":                             {"TestNothingIsHeldBack", "TestTheTwoBodiesOfOneRequestFlowAtOnce"},
	"R7 memory does not grow with the body":               {"TestMemoryDoesNotGrowWithTheBody"},
	"R8 bodies byte for byte":                             {"TestLargeBodiesPassByteForByte", "TestExchangesAreThoseOfADirectConnection"},
	"R9 heads byte for byte":                              {"TestHeadsPassUnchanged", "TestAnswersPassUnchanged", "TestExchangesAreThoseOfADirectConnection"},
	"R10 target and Host untouched":                       {"TestHeadsPassUnchanged", "TestRequestsInDoubtAreRefused"},
	"R11 absolute form":                                   {"TestHeadsPassUnchanged", "TestRequestsInDoubtAreRefused"},
	"R12 strict heads":                                    {"TestRequestsInDoubtAreRefused", "TestAnEndlessChunkExtensionIsRefused", "TestChunkExtensionsAreBoundedTogether", "FuzzRequestHead"},
	"R13 framing is written anew":                         {"TestHeadsPassUnchanged", "TestAnswersPassUnchanged", "TestAnAnswerWithDoubtfulFramingIsTheLastOfItsConnection", "FuzzResponseHead", "FuzzChunks"},
	"R14 bad framing: 400 or 502, then an end":            {"TestRequestsInDoubtAreRefused", "TestBadAnswersBecome502WithoutTheServersBytes", "TestAnswersInDoubtBecome502", "TestATruncatedAnswerIsNotPassedOffAsWhole"},
	"R15 what is cut off is never whole":                  {"TestATruncatedUploadIsNeverWhole", "TestATruncatedAnswerIsNotPassedOffAsWhole", "TestABrokenAnswerWithoutALengthEndsInAReset"},
	"R16 hop-by-hop fields":                               {"TestHeadsPassUnchanged", "TestExchangesAreThoseOfADirectConnection"},
	"R17 trailers both ways":                              {"TestRequestTrailersReachTheServer", "TestAnswersPassUnchanged"},
	"R18 interim answers and Expect":                      {"TestAnswersPassUnchanged", "TestExpect100ContinueIsBetweenClientAndServer", "TestAnInterimAnswerSaysNothingOfABody", "TestAFloodOfInterimAnswersPasses"},
	"R19 answers without a body":                          {"TestAnswersPassUnchanged", "TestBytesAfterAnAnswerWithoutABodyAreNoAnswer"},
	"R20 HTTP/1.0":                                        {"TestAnswersPassUnchanged", "TestARequestWithoutHostGetsTheServers"},
	"R21 nothing is sent twice":                           {"TestARequestArrivesOnceAtMost"},
	"R22 a stale connection costs no request":             {"TestAnIdleCloseOfTheServerIsMirrored"},
	"R23 unasked bytes discard a connection":              {"TestUnaskedBytesOfTheServerAreNoAnswer", "TestBytesAfterAnAnswerWithoutABodyAreNoAnswer"},
	"R24 upgrades to websocket only":                      {"TestNoOtherProtocolHidesBesideWebsocket", "TestOnlyTheProtocolAskedForIsSwitchedTo", "TestBadAnswersBecome502WithoutTheServersBytes"},
	"R25 tunnels keep early bytes and half-closes":        {"TestATunnelCarriesBytesAndHalfClosesBothWays"},
	"R26 pipelined answers leave when ready":              {"TestPipelinedRequestsAreAnsweredInOrderAsTheyAreReady"},
	"R27 timeouts are of idleness":                        {"TestIdleTimeoutsAreOfIdleness", "TestASlowHeadIsGivenUp", "TestASlowReaderIsNoStalledOne", "TestAServerThatTakesNoBytesIsNamed", "TestTheServersSilenceCountsFromTheEndOfTheUpload", "TestAServerThatNeverAnswersTimesOutWhereThatIsWanted"},
	"R28 limits answer":                                   {"TestALargeHeadPassesAndATooLargeOneIsRefused", "TestConnectionsBeyondTheLimitAreToldSo", "TestAServerThatCannotBeReachedIsNamed", "TestIdleConnectionsTakeNoPlace"},
	"R29 shutdown":                                        {"TestShutdownLetsRequestsEndAndClosesIdleConnectionsAtOnce", "TestAnEndUnderLoadLosesNoRequest"},
	"R30 a bug ends one connection":                       {"TestAPanicEndsOneConnectionOnly", "TestABugDuringAnUploadEndsBoth"},
	"R31 nothing of a pooled object outlives its request": {"TestARecordStaysAsItWas", "TestAConnectionShedsWhatALargeHeadTook"},
	"R33 IPv4, IPv6 and unix servers":                     {"TestAUnixServer", "TestAServerOnIPv6"},
	"R34 errors carry none of the server's bytes":         {"TestBadAnswersBecome502WithoutTheServersBytes"},
	"R35 no data race, whatever clients and servers do":   {"TestChaosLeavesNothingBehind"},
}

func TestEachRequirementHasItsTests(t *testing.T) {
	tests := testsOfPackage(t)
	for n := 1; n <= 35; n++ {
		if n == 32 {
			continue
		}
		found := false
		for text, names := range requirements {
			if !strings.HasPrefix(text, fmt.Sprintf("R%d ", n)) {
				continue
			}
			found = len(names) > 0
			for _, name := range names {
				if !tests[name] {
					t.Errorf("%s: there is no %s", text, name)
				}
			}
		}
		if !found {
			t.Errorf("no test holds weir to R%d", n)
		}
	}
}

// testsOfPackage are the names of its test functions, as the sources have them.
func testsOfPackage(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
				names[f.Name.Name] = true
			}
		}
	}
	return names
}
